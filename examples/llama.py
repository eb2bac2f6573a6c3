"""Train a small Llama, and generate with it, on this package's kernels, beside the same model untouched.

    python examples/llama.py

Norms, rotary embedding and gated MLPs are replaced by the Hub's own mechanism, attention by its name. The weights are
random and the text is this file, so that nothing is downloaded. Runs on a GPU or a CPU; the loss of every step and the
generated tokens must be the untouched model's.
"""

import copy
import sys
import time
from pathlib import Path

import torch
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from quickstart import INTERPRETED, REPO, VERSION, load, pick_device

STEPS = 2 if INTERPRETED else 20  # the interpreter is slow
LAYERS = {
    "RMSNorm": "RMSNorm",
    "SwiGLUMLP": "SwiGLUMLP",
    "SiLU": "SiLU",
    "rotary_pos_emb": "apply_rotary_transformers",
}
# Two right ways to compute in float32 differ by rounding, and training carries that on. Relative to the loss, what is
# wrong differs by more in 20 steps: gelu for silu by 2e-2, rotation to the other side by 8e-2, eps of 1e-5 by 1.3e-4.
BOUND = 1e-4


def new_model(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def use_our_kernels(model, device):
    """Bind this package's forwards, and have transformers call its attention."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    # transformers names its norms, activations and rotary function; the MLP it does not, and an MLP has the activation
    # that its config says.
    replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP", lambda module: module.config.hidden_act == "silu")
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    mapping = {
        key: {kind: LayerRepository(REPO, layer_name=layer, revision=f"v{VERSION}", trust_remote_code=True)}
        for key, layer in LAYERS.items()
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=kind, use_fallback=False)
    # transformers looks for the word "flash" in the name, and masks wrongly where it is not.
    model.set_attn_implementation(f"{REPO}:flash_attn_func", allow_all_kernels=True)
    return model


def train(model, ids):
    """The loss of each step, and the median time of one in milliseconds."""
    optimizer, losses, times = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    model.train()
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    return losses, 1e3 * sorted(times)[STEPS // 2]


def generate(model, ids):
    with torch.inference_mode():
        return model.eval().generate(ids[:1, :16], max_new_tokens=STEPS, do_sample=False)[0, 16:].tolist()


def ours(model, kernel):
    """How many modules of each class have a forward that is defined in the package."""
    found = {}
    for module in model.modules():
        if getattr(module.forward, "__module__", "").startswith(kernel.__name__):
            found[type(module).__name__] = found.get(type(module).__name__, 0) + 1
    return found


def main():
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)
    device = pick_device()
    try:
        import transformers
    except ImportError:
        sys.exit("transformers is missing: pip install transformers==5.22.2")

    transformers.logging.set_verbosity_error()
    print(f"Loading {REPO}, and making a small Llama on {device} ...")
    kernel = load()
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()[: 4 * 32])).view(4, 32).to(device)
    model = new_model(device)
    untouched = copy.deepcopy(model)

    # The untouched model goes first: the rotary embedding is a function, replaced for every Llama of the process.
    expected, their_time = train(untouched, text)
    their_tokens = generate(untouched, text)
    use_our_kernels(model, device)
    replaced = ours(model, kernel)
    print("This package computes " + ", ".join(f"{n} {name}" for name, n in replaced.items()) + ", rotary, attention.")
    found, my_time = train(model, text)
    tokens = generate(model, text)

    print("\nstep   loss       untouched")
    for step in sorted({0, STEPS // 4, STEPS // 2, STEPS - 1}):
        print(f"{step + 1:4}   {found[step]:.6f}   {expected[step]:.6f}")
    off = max(abs(a - b) / b for a, b in zip(found, expected))
    print(
        f"\nLargest difference of a step's loss: {off:.1e} of it. Generated the same tokens: {tokens == their_tokens}"
    )
    print(f"Time per step: {my_time:.1f} ms, untouched {their_time:.1f} ms")

    if replaced != {"LlamaRMSNorm": 5, "LlamaMLP": 2, "SiLUActivation": 2}:
        sys.exit("Not all that can be replaced was.")
    if not off <= BOUND or tokens != their_tokens:
        sys.exit(f"The two models do not agree within {BOUND:.0e}.")
    print(f"The two agree within {BOUND:.0e}.")


if __name__ == "__main__":
    main()
