"""Load the package from the Hub, and hold every one of its functions against PyTorch on the device at hand.

    python examples/quickstart.py [--dtype float32]

Runs on a GPU or a CPU; with TRITON_INTERPRET=1 the CPU runs the very kernels that a GPU would, slowly.
"""

import argparse
import inspect
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import get_kernel, has_kernel

REPO, VERSION = "org/portable-kernels", 1
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# What each function is held against. A lambda's parameters are the function's own, by name: see `arguments`.
TORCH_HAS = {
    "softmax": lambda x, dim: F.softmax(x, dim),
    "log_softmax": lambda x, dim: F.log_softmax(x, dim),
    "rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
    "relu": lambda x: F.relu(x),
    "leaky_relu": lambda x: F.leaky_relu(x),
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "tanh": lambda x: torch.tanh(x),
    "softplus": lambda x: F.softplus(x),
    "mish": lambda x: F.mish(x),
    "hardswish": lambda x: F.hardswish(x),
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "group_norm": lambda x, num_groups, weight, bias: F.group_norm(x, num_groups, weight, bias),
    "cross_entropy": lambda x, target, reduction: F.cross_entropy(wide(x), target, reduction=reduction),
    "matmul": lambda a, b: a @ b,
    "linear": lambda x, weight: F.linear(x, weight),
    "scaled_dot_product_attention": lambda query, key, value: F.scaled_dot_product_attention(query, key, value),
}
TORCH_COMPOSES = {
    "add_rms_norm": lambda x, residual, weight: (F.rms_norm(x + residual, weight.shape, weight, 1e-6), x + residual),
    "add_layer_norm": lambda x, residual, weight: (F.layer_norm(x + residual, weight.shape, weight), x + residual),
    "relu_squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gated": lambda x, activation: getattr(F, activation)(first(x)) * second(x),
    "silu_and_mul": lambda x: F.silu(first(x)) * second(x),
    "mul_and_silu": lambda x: first(x) * F.silu(second(x)),
    "gelu_and_mul": lambda x: F.gelu(first(x)) * second(x),
    "mul_and_gelu": lambda x: first(x) * F.gelu(second(x)),
    "gelu_tanh_and_mul": lambda x: F.gelu(first(x), approximate="tanh") * second(x),
    "relu_and_mul": lambda x: F.relu(first(x)) * second(x),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "distillation_kl": lambda x, teacher, reduction: divergence(x, teacher),
    "distillation_jsd": lambda x, teacher, reduction: jensen_shannon(x, teacher),
    "masked_softmax": lambda x, mask: F.softmax(x.masked_fill(~mask, -torch.inf), -1),
    "rms_norm_gated": lambda x, gate, weight: F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(gate),
    "modulated_layer_norm": lambda x, scale, shift: F.layer_norm(x, scale.shape, eps=1e-6) * (1 + scale) + shift,
    "modulated_rms_norm": lambda x, scale, shift: F.rms_norm(x, scale.shape, eps=1e-6) * (1 + scale) + shift,
    "bias_act": lambda x, bias, activation: getattr(F, activation)(x + bias),
    "residual_scale_add": lambda x, residual, scale: residual + x * scale,
    "apply_rotary_pos_emb": lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
    "rotary": lambda x, cos, sin: rotated(x, cos, sin),
    "qk_norm_rotary": lambda q, k, q_weight, k_weight, cos, sin: tuple(
        rotated(F.rms_norm(t, w.shape, w, 1e-6), cos, sin) for t, w in ((q, q_weight), (k, k_weight))
    ),
    "gated_linear": lambda x, weight_gate, weight_up: F.silu(x @ weight_gate.t()) * (x @ weight_up.t()),
    "flash_attn_func": lambda q, k, v: turned(F.scaled_dot_product_attention(turned(q), turned(k), turned(v))),
}
# Functions that nothing here can be held against: their own tests do.
ELSEWHERE = {
    "dropout": "random: tests/test_dropout.py",
    "dropout_add": "random: tests/test_dropout.py",
    "topk_softmax": "gives indices: tests/test_topk_softmax.py",
    "linear_cross_entropy": "rounds logits as a matmul does: tests/test_linear_cross_entropy.py",
    "token_log_probs": "rounds logits as a matmul does: tests/test_linear_cross_entropy.py",
    "vocab_parallel_cross_entropy": "several processes: tests/test_cross_entropy.py",
    "grouped_mm": "groups of rows: tests/test_grouped_mm.py",
    "quantize_fp8": "gives float8: tests/test_scaled_matmul.py",
    "scaled_matmul": "takes float8: tests/test_scaled_matmul.py",
    "flash_attn_varlen_func": "packed sequences: tests/test_attention.py",
    "flash_attn_with_kvcache": "writes to a cache: tests/test_kv_cache_attention.py",
}
# Where an argument is not the one that `arguments` has under its name.
ARGUMENTS = {
    "rotary": {"x": "q"},
    "matmul": {"a": "x", "b": "columns"},
    "linear": {"weight": "matrix"},
    "gated_linear": {"weight_gate": "matrix", "weight_up": "matrix"},
    "flash_attn_func": {"q": "tokens", "k": "tokens", "v": "tokens"},
    "scaled_dot_product_attention": {"query": "heads", "key": "heads", "value": "heads"},
}


def pick_device():
    gpu = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")
    return torch.device("cpu" if INTERPRETED else gpu)


def first(x):
    return x.chunk(2, -1)[0]


def second(x):
    return x.chunk(2, -1)[1]


def wide(x):
    """At least float32, which losses are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mixed(x, teacher):
    return ((torch.softmax(wide(x), -1) + torch.softmax(wide(teacher), -1)) / 2).log()


def divergence(x, teacher):
    """KL(softmax(teacher) || softmax(x)) of every row."""
    log_p, log_q = (torch.log_softmax(wide(t), -1) for t in (x, teacher))
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def jensen_shannon(x, teacher):
    middle = mixed(x, teacher)
    return (divergence(middle, x) + divergence(middle, teacher)) / 2


def rotated(x, cos, sin):
    swapped = torch.cat([-second(x), first(x)], -1)
    return x * cos.unsqueeze(1) + swapped * sin.unsqueeze(1)


def turned(x):
    return x.transpose(1, 2)


def arguments(rows, columns, dtype, device):
    """Every argument that a function above may name."""
    torch.manual_seed(0)
    names = ("x", "residual", "gate", "up")
    drawn = {name: 3 * torch.randn(rows, columns, device=device, dtype=dtype) for name in names}
    drawn["weight"], drawn["bias"] = torch.randn(2, columns, device=device, dtype=dtype)
    drawn["teacher"], drawn["scale"], drawn["shift"] = drawn["residual"], drawn["weight"], drawn["bias"]
    drawn["mask"] = torch.rand(rows, columns, device=device) < 0.7
    D = 64  # rows as tokens, columns as heads
    drawn["q"], drawn["k"] = (drawn[n].view(1, rows, columns // D, D).transpose(1, 2) for n in ("gate", "up"))
    drawn["q_weight"], drawn["k_weight"] = torch.randn(2, D, device=device, dtype=dtype)
    angles = torch.rand(1, rows, D // 2, device=device).repeat(1, 1, 2) * 6
    drawn["cos"], drawn["sin"] = angles.cos().to(dtype), angles.sin().to(dtype)
    drawn["matrix"] = torch.randn(columns // 2, columns, device=device, dtype=dtype) * columns**-0.5
    drawn["columns"] = drawn["matrix"].t()
    drawn["heads"] = drawn["q"][:, :2]
    drawn["tokens"] = drawn["heads"].transpose(1, 2)
    drawn["target"] = torch.randint(columns, (rows,), device=device)
    return {**drawn, "dim": -1, "activation": "silu", "reduction": "none", "num_groups": 4}


def error_in_ulps(results, exact):
    """The largest |result - exact|, in ulps of |exact| + rms of its row: a sum rounds at the scale of what it adds."""
    worst = 0.0
    for y, e in zip(as_tuple(results), as_tuple(exact)):
        if y.shape != e.shape:
            return torch.inf
        scale = e.abs() + e.square().mean(-1, keepdim=True).sqrt()
        error = (y.to(e.device).double() - e).abs() / (scale * torch.finfo(y.dtype).eps)
        worst = max(worst, error.nan_to_num(nan=torch.inf).max().item())  # a NaN is as wrong as can be
    return worst


def in_float64(value):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.cpu().double() if value.device.type == "xpu" else value.double()  # some Intel GPUs have no float64


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def microseconds(function, device):
    """Median time of a call."""
    if device.type != "cpu":
        from triton.testing import do_bench  # on the device's own clock, with its cache emptied before every call

        return 1000 * do_bench(function, warmup=10, rep=50, return_mode="median")
    times, stop = [], time.perf_counter() + 0.05
    while not times or time.perf_counter() < stop:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[len(times) // 2]


def load():
    """The package, as anyone loads it who has a network: the first call downloads it, later ones find it in the cache.

    LOCAL_KERNELS="org/portable-kernels=<folder>", which `make demo` sets, makes it load from a folder instead. To load
    from publishers who are not on the Hub's trusted list, read their code and add trust_remote_code=True to both calls.
    """
    try:
        found = has_kernel(REPO, version=VERSION)
    except Exception as error:  # no network, no such repository
        sys.exit(f"{REPO} cannot be looked up: {error}\nIn a clone, `make demo` builds it and loads what it has built.")
    if not found:
        sys.exit(f"{REPO} has no build for this machine: torch {torch.__version__}.")
    return get_kernel(REPO, version=VERSION)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="bfloat16 on a GPU, else float32")
    asked = parser.parse_args().dtype
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)

    device = pick_device()
    dtype = asked or ("float32" if device.type == "cpu" else "bfloat16")
    rows, columns = (4, 128) if INTERPRETED else (512, 1024) if device.type == "cpu" else (4096, 8192)

    kernel = load()
    print(f"{REPO} v{VERSION}: variant {Path(kernel.__file__).parent.name}, loaded as {kernel.__name__}")
    print(kernel.report(device))

    public = [name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name))]
    public = [name for name in public if name not in ("report", "warmup")]
    torchs = {**TORCH_HAS, **TORCH_COMPOSES}
    if missing := [name for name in public if name not in torchs and name not in ELSEWHERE]:
        sys.exit(f"quickstart.py has nothing to hold these against: {', '.join(missing)}")

    print(f"""
Each function on normal input of spread 3. Columns in pairs: this package, then PyTorch.
error: the largest |result - exact|, in ulps of |exact| + rms of its row; exact is PyTorch in float64.
✓: the error is at most 2 ulps, or at most 1 ulp over PyTorch's.
time: median of a call, in microseconds{"; the interpreter is there to check kernels, not to be fast" * INTERPRETED}.
*: PyTorch has no such function; the plain composition of its functions stands in.

{"":29} {"shape":>10} {"dtype":>9}   {"error":>6} {"torch":>6}     {"time":>9} {"torch":>9}""")
    drawn = arguments(rows, columns, getattr(torch, dtype), device)
    wrong = []
    for name in public:
        if name in ELSEWHERE:
            print(f"{name:29} {ELSEWHERE[name]}")
            continue
        renamed = ARGUMENTS.get(name, {})
        given = {key: drawn[renamed.get(key, key)] for key in inspect.signature(torchs[name]).parameters}
        ours, theirs = partial(getattr(kernel, name), **given), partial(torchs[name], **given)

        exact = torchs[name](**{key: in_float64(value) for key, value in given.items()})
        got, expected = ours(), theirs()
        error, torch_error = error_in_ulps(got, exact), error_in_ulps(expected, exact)
        same_dtypes = [y.dtype for y in as_tuple(got)] == [y.dtype for y in as_tuple(expected)]
        right = same_dtypes and error <= max(2.0, torch_error + 1.0)
        wrong += [] if right else [name]
        print(
            f"{name + '*' * (name in TORCH_COMPOSES):29} {f'{rows}x{columns}':>10} {dtype:>9}   "
            f"{error:6.2f} {torch_error:6.2f}  {'✓' if right else '✗'}  "
            f"{microseconds(ours, device):9.1f} {microseconds(theirs, device):9.1f}"
        )

    if wrong:
        sys.exit(f"\n{len(wrong)} of {len(public)} functions are off: {', '.join(wrong)}")
    print(f"\nAll {len(public) - len(ELSEWHERE.keys() & set(public))} functions agree with PyTorch.")


if __name__ == "__main__":
    main()
