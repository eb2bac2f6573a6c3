"""Measure whole models: a Llama-shaped decoder of 1.2 billion parameters, and an encoder shaped like all-MiniLM-L6-v2.

    python benchmarks/end_to_end.py --json results.json [--tiny]

Weights are random, of one seed, in bfloat16; the text is this repository's, its words numbered. The decoder trains
(AdamW) and prefills, the encoder embeds sentences. Each way is a process of its own: all build and compile at once,
then each measures alone, so that its peak of memory is its own. Losses and results are held against PyTorch's.
`--tiny` is for a look on a machine without a GPU.
"""

import argparse
import datetime
import fcntl
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import turns

ROOT = Path(__file__).resolve().parent.parent
REPO, OURS = "org/portable-kernels", "portable-kernels"
# Each way: whose attention and whose other ops are put in, and whether it is compiled.
WAYS = {
    "torch": ("torch", "torch", False),
    "liger": ("torch", "liger", False),
    f"{OURS}, torch's attention": ("torch", "ours", False),
    OURS: ("ours", "ours", False),
    "torch.compile": ("torch", "torch", True),
    f"{OURS}, torch.compile": ("ours", "ours", True),
}
DECODER = dict(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=True,
)  # fmt: skip
ENCODER = dict(
    vocab_size=30522, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12,
    max_position_embeddings=512,
)  # fmt: skip
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SIZES = {
    False: dict(batch=2, tokens=4096, steps=20, prefills=12, sentences=(64, 1024), runs=24),
    True: dict(batch=2, tokens=32, steps=4, prefills=3, sentences=(100,), runs=2),
}


@functools.cache
def documents():
    patterns = ("*.md", "docs/integration.md", "torch-ext/portable_kernels/*.py", "tests/*.py")
    return [path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def words(text):
    return re.findall(r"\w+|[^\w\s]", text)


def numbered(vocabulary):
    """Every word of the repository -> its number, the words that come first first; 0 is padding."""
    numbers = {}
    for text in documents():
        for word in words(text):
            numbers.setdefault(word, 1 + len(numbers) % (vocabulary - 1))
    return numbers


def sentences():
    prose = re.compile(r"\b[A-Z][a-z]+ [^\n.`|]{20,300}\.")
    return [found for text in documents() for found in prose.findall(text)]


def patched(model, attention, others):
    if others == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    elif others == "ours":
        from kernels import get_kernel

        patching = get_kernel(REPO, version=1).patching
        print(patching.patch_model(model), file=sys.stderr, flush=True)
        if attention == "ours" and model.config.model_type == "bert":  # sentences are padded
            print(patching.patch_attention(model), file=sys.stderr, flush=True)
        elif attention == "ours":  # by name, for torch.compile: nothing then makes a mask of queries by keys
            model.set_attn_implementation(f"{REPO}:flash_attn_func", allow_all_kernels=True)


def torch_of():
    import torch

    return torch


class Decoder:
    def __init__(self, way, tiny, device):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self.size, self.device = SIZES[tiny], device
        attention, others, compiled = WAYS[way]
        config = LlamaConfig(**(DECODER | (TINY | {"num_key_value_heads": 2, "head_dim": 16} if tiny else {})))
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with device:
            torch.set_default_dtype(torch.bfloat16)
            self.model = LlamaForCausalLM(config)
            torch.set_default_dtype(torch.float32)
        self.model.config.use_cache = False
        patched(self.model, attention, others)
        self.start = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        # The model's own method is compiled, so that train() and eval() reach it.
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model
        numbers = numbered(config.vocab_size)
        ids = torch.tensor([numbers[word] for text in documents() for word in words(text)])
        each = self.size["batch"] * self.size["tokens"]
        ids = ids.repeat(1 + self.size["steps"] * each // len(ids))[: self.size["steps"] * each]
        self.batches = ids.view(-1, self.size["batch"], self.size["tokens"]).to(device)

    def train(self, steps):
        """Losses, and seconds a step, from the same weights each time."""
        import torch

        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.start[name])
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        losses, seconds = [], []
        for ids in self.batches[:steps]:
            began = time.perf_counter()
            loss = self.call(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device
            synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return losses, seconds

    def prefill(self, runs):
        import torch

        self.model.eval()
        seconds = []
        for _ in range(runs):
            synchronize(self.device)
            began = time.perf_counter()
            with torch.no_grad():
                logits = self.call(input_ids=self.batches[0], logits_to_keep=1).logits
            synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return logits[:, -1, :512].float().flatten().tolist(), seconds

    def warm(self):
        self.train(2)
        self.prefill(1)

    def measure(self):
        tokens = self.size["batch"] * self.size["tokens"]
        forget(self.device)
        losses, seconds = self.train(self.size["steps"])
        yield {"what": "training step", "losses": losses, **speed(tokens, seconds[3:]), **peak(self.device)}
        forget(self.device)
        result, seconds = self.prefill(self.size["prefills"])
        yield {"what": "prefill", "result": result, **speed(tokens, seconds[2:]), **peak(self.device)}


class Encoder:
    def __init__(self, way, tiny, device):
        import torch
        from transformers import BertConfig, BertModel

        self.size, self.device = SIZES[tiny], device
        attention, others, compiled = WAYS[way]
        config = BertConfig(**(ENCODER | (TINY if tiny else {})))
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with device:
            self.model = BertModel(config, add_pooling_layer=False).eval().to(torch.bfloat16)
        patched(self.model, attention, others)
        self.call = torch.compile(self.model, dynamic=True) if compiled else self.model
        numbers = numbered(config.vocab_size)
        # Of like lengths together, as sentence-transformers sorts them.
        self.text = sorted(([numbers[w] for w in words(s)][:128] for s in sentences()), key=len)

    def batches(self, count):
        import torch

        text = self.text * (1 + count // len(self.text))
        for i in range(self.size["runs"]):
            at = i * 997 % (len(text) - count + 1)
            chosen = text[at : at + count]
            longest = max(map(len, chosen))
            ids = torch.tensor([s + [0] * (longest - len(s)) for s in chosen]).to(self.device)
            yield {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def embed(self, batch):
        import torch

        with torch.inference_mode():
            mask = batch["attention_mask"].unsqueeze(-1)
            tokens = self.call(**batch).last_hidden_state * mask
            return torch.nn.functional.normalize(tokens.sum(1) / mask.sum(1), dim=-1)

    def warm(self):
        for count in self.size["sentences"]:
            for batch in list(self.batches(count)) * 3:  # sizes that have come often enough to be written down
                self.embed(batch)
        synchronize(self.device)

    def measure(self):
        for count in self.size["sentences"]:
            batches, seconds = list(self.batches(count)), []
            forget(self.device)
            for batch in batches + batches:
                synchronize(self.device)
                began = time.perf_counter()
                y = self.embed(batch)
                synchronize(self.device)
                seconds.append(time.perf_counter() - began)
            yield {
                "what": f"{count} sentences", "result": y[:8].float().flatten().tolist(),
                **speed(count, seconds[len(batches) :]), **peak(self.device),
            }  # fmt: skip


def synchronize(device):
    if device.type == "cuda":
        torch_of().cuda.synchronize()


def forget(device):
    if device.type == "cuda":
        torch_of().cuda.empty_cache()
        torch_of().cuda.reset_peak_memory_stats()


def peak(device):
    return {"peak_mib": torch_of().cuda.max_memory_allocated() / 2**20} if device.type == "cuda" else {}


def speed(count, seconds):
    """Per second, in the median run, and in those that 20 and 80 of a hundred are slower than."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    p20, median, p80 = (tenths[i] for i in (1, 4, 7))
    return {"per_s": count / median, "p20": count / p80, "p80": count / p20}


def child(model, way, tiny):
    """Builds, compiles, waits for its turn, measures."""

    def prepare():
        import torch

        began = time.perf_counter()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        runner = {"decoder": Decoder, "encoder": Encoder}[model](way, tiny, device)
        with open(__file__) as lock:
            if not WAYS[way][2]:  # compiling takes long, and the others have not the memory to run all at once
                fcntl.flock(lock, fcntl.LOCK_EX)
            runner.warm()
        forget(device)
        return runner.measure, {"seconds": time.perf_counter() - began}

    turns.take_turn(prepare)


def compare(rows):
    """How far each is off torch: the losses step by step, and the results."""
    of_torch = {(r["model"], r["what"]): r for r in rows if r["way"] == "torch"}
    for row in rows:
        theirs = of_torch.get((row["model"], row["what"]))
        if theirs and "losses" in row:
            row["loss_off"] = max(abs(a - b) for a, b in zip(row["losses"], theirs["losses"]))
        elif theirs and "result" in row:
            total = sum(b * b for b in theirs["result"]) or 1.0
            row["off_by"] = (sum((a - b) ** 2 for a, b in zip(row["result"], theirs["result"])) / total) ** 0.5
    for row in rows:
        row.pop("result", None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--models", nargs="*", default=["decoder", "encoder"], choices=["decoder", "encoder"])
    parser.add_argument("--limit", type=float, default=148, help="seconds in all; what is late by then is left out")
    parser.add_argument("--tiny", action="store_true", help="small models, also without a GPU")
    parser.add_argument("--commit", help="of what is measured; else git is asked")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child, options.tiny)
    import torch

    if not torch.cuda.is_available() and not options.tiny:
        sys.exit("end_to_end.py measures on a GPU, and torch sees none; --tiny runs on a CPU")
    began = time.monotonic()
    environment = {"LOCAL_KERNELS": f"{REPO}={ROOT / 'build'}", "TORCHINDUCTOR_COMPILE_THREADS": "5", **os.environ}
    workers = [
        turns.Worker(
            (model, way), [sys.executable, __file__, "--child", model, way, *["--tiny"] * options.tiny], environment
        )
        for model in options.models
        for way in options.ways
        if not (model == "encoder" and WAYS[way][1] == "liger")  # Liger has no patch for BERT
    ]
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    record = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "torch": torch.__version__,
        "triton": version("triton"), "transformers": version("transformers"), "liger": version("liger_kernel"),
        "commit": options.commit or asked.stdout.strip(), "date": datetime.date.today().isoformat(),
        "size": SIZES[options.tiny], "rows": [], "failed": [],
    }  # fmt: skip

    def say(worker, text):
        print(f"{time.monotonic() - began:4.0f} s: {', '.join(worker.name)}: {text}", flush=True)

    def heard(worker, line):
        if "ready" in line:
            say(worker, "compiled and ready")
        elif "row" in line:
            model, way = worker.name
            row = {"model": model, "way": way, **line["row"]}
            record["rows"].append(row)
            memory = f", peak {row['peak_mib']:.0f} MiB" if "peak_mib" in row else ""
            say(worker, f"{row['what']} {row['per_s']:.0f}/s{memory}")

    def lost(worker, why):
        record["failed"].append(f"{', '.join(worker.name)}: {why}")
        say(worker, f"LOST: {why}\n{''.join(worker.errors[-12:])}")

    print(f"{len(workers)} processes build and compile, then measure one by one; {options.limit:.0f} s", flush=True)
    turns.run(
        workers, heard, lost, jobs=len(workers), ready_by=began + options.limit - 4.5 * len(workers),
        done_by=began + options.limit, patience=60,
    )  # fmt: skip
    compare(record["rows"])
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        off = f"loss off {row['loss_off']:.1e}" if "loss_off" in row else f"off {row.get('off_by', float('nan')):.1e}"
        print(f"{row['model']}, {row['what']}, {row['way']}: {row['per_s']:.0f}/s, {off}")
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    return 1 if record["failed"] else 0


def version(package):
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
