"""One typical call of every public function: what all of them must do is tested over this table.

`examples/quickstart.py` has most of them, each beside what PyTorch does; here are the others, in the same form.
"""

import importlib.util
import inspect
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

_spec = importlib.util.spec_from_file_location(
    "quickstart", Path(__file__).resolve().parent.parent / "examples" / "quickstart.py"
)
quickstart = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(quickstart)
wide, turned = quickstart.wide, quickstart.turned


def _chosen(x, k, dtype=None):
    return tuple(F.softmax(x, -1, dtype=dtype).topk(k))


def _linear_loss(x, linear_weight, target):
    return F.cross_entropy(wide(F.linear(x, linear_weight)), target)


def _log_probs(x, linear_weight, ids):
    return wide(F.linear(x, linear_weight)).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _grouped(a, b, offs):
    ends = [0, *offs.tolist()]
    return torch.cat([a[i:j] @ w for i, j, w in zip(ends, ends[1:], b)])


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    ends = cu_seqlens_q.tolist()
    one = lambda *qkv: turned(F.scaled_dot_product_attention(*(turned(t[None]) for t in qkv)))[0]  # noqa: E731
    return torch.cat([one(*(t[i:j] for t in (q, k, v))) for i, j in zip(ends, ends[1:])])


def _cached(q, k_cache, v_cache):
    return turned(F.scaled_dot_product_attention(*(turned(t) for t in (q, k_cache, v_cache))))


def _product(a, b, scale_a, scale_b, out_dtype):
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


def _quantized(x):
    scale = wide(x).abs().amax() / 448 if x.numel() else torch.ones((), device=x.device)
    return (wide(x) / scale).to(torch.float8_e4m3fn), scale


def _kept(x, seed):
    raise NotImplementedError("PyTorch draws other masks")


OTHERS = {
    "dropout": _kept,
    "dropout_add": lambda x, residual, seed: _kept(x, seed),
    "topk_softmax": _chosen,
    "linear_cross_entropy": _linear_loss,
    "token_log_probs": _log_probs,
    "grouped_mm": _grouped,
    "quantize_fp8": _quantized,
    "scaled_matmul": _product,
    "flash_attn_varlen_func": _packed,
    "flash_attn_with_kvcache": _cached,
    **{
        f"reductions.{name}": lambda x, dim, name=name: getattr(torch, name)(x, dim)
        for name in ("sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "logsumexp", "cumsum")
    },
    "reductions.vector_norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
}
RENAMED = {
    **quickstart.ARGUMENTS,
    "linear_cross_entropy": {"linear_weight": "matrix", "target": "ids"},
    "token_log_probs": {"linear_weight": "matrix"},
    "grouped_mm": {"a": "x", "b": "experts"},
    "scaled_matmul": {"a": "x_fp8", "b": "columns_fp8", "scale_a": "one", "scale_b": "one"},
    "flash_attn_varlen_func": {
        **dict.fromkeys("qkv", "packed"), **dict.fromkeys(["cu_seqlens_q", "cu_seqlens_k"], "ends"),
        **dict.fromkeys(["max_seqlen_q", "max_seqlen_k"], "rows"),
    },
    "flash_attn_with_kvcache": {"q": "tokens", "k_cache": "tokens", "v_cache": "tokens"},
}  # fmt: skip
PROCESSES = {"vocab_parallel_cross_entropy"}  # of several processes: tests/test_cross_entropy.py
TORCHS = {**quickstart.TORCH_HAS, **quickstart.TORCH_COMPOSES, **OTHERS}
NAMES = list(TORCHS)
NO_GRADIENT = {
    "quantize_fp8", "scaled_matmul", "flash_attn_with_kvcache", "reductions.argmax", "reductions.argmin",
}  # fmt: skip
RANDOM = {"dropout", "dropout_add"}


def arguments(name, dtype=torch.float32, device="cpu", rows=4, columns=128):
    """{argument: value} of the call."""
    drawn = quickstart.arguments(rows, columns, dtype, device)
    drawn.update(rows=rows, seed=7, out_dtype=torch.bfloat16, one=torch.ones((), device=device))
    drawn["packed"] = drawn["tokens"][0]
    drawn["ids"] = drawn["target"] % (columns // 2)
    drawn["offs"] = torch.tensor([rows // 2, rows], dtype=torch.int32, device=device)
    drawn["ends"] = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=device)
    drawn["experts"] = torch.stack([drawn["columns"], drawn["columns"] / 2])
    if name == "scaled_matmul":
        drawn["x_fp8"], drawn["columns_fp8"] = (wide(drawn[t]).to(torch.float8_e4m3fn) for t in ("x", "columns"))
    if name == "topk_softmax":
        drawn["k"] = 4
    renamed = RENAMED.get(name, {})
    wanted = [p.name for p in inspect.signature(TORCHS[name]).parameters.values() if p.default is p.empty]
    given = {key: drawn[renamed.get(key, key)] for key in wanted}
    apart = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731  one tensor may be given twice
    return {key: apart(value) for key, value in given.items()}


def find(kernel, name):
    """The function of that name."""
    for part in name.split("."):
        kernel = getattr(kernel, part)
    return kernel


def leaves(name, given):
    """The names of the arguments that have gradients."""
    if name in NO_GRADIENT:
        return []
    return [key for key, t in given.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]


def on_tensors(function, given, names):
    """`function` of the tensors `names` alone, by position, the other arguments as given."""
    rest = {key: value for key, value in given.items() if key not in names}
    return partial(lambda *tensors: function(**dict(zip(names, tensors)), **rest))


def floats(results):
    """Those of the results that a gradient can flow into."""
    results = results if isinstance(results, tuple) else (results,)
    return tuple(t for t in results if t is not None and t.is_floating_point() and t.dtype.itemsize > 1)
