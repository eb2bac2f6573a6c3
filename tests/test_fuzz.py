"""Layouts crossed with dtypes, and optional arguments with each other.

Drawn: the same ones each time, or FUZZ=<how many> others (`make fuzz`).
"""

import inspect
import os
import sys

import pytest
import torch
from _calls import NAMES, leaves
from _numerics import DTYPES
from test_every_op import ALL_LAYOUTS, INTERPRET, Call, hold_layouts, into

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def drawn(examples):
    return settings(
        max_examples=int(os.environ.get("FUZZ", examples)), derandomize="FUZZ" not in os.environ,
        deadline=None, database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@drawn(2 if INTERPRET else 30)
@given(data=st.data())
def test_layouts_crossed_with_dtypes(kernel, device, data):
    name = data.draw(st.sampled_from(NAMES))
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([64, 128, 192]))
    call = Call(kernel, name, device, dtype, rows=rows, columns=columns)
    layouts = {n: data.draw(st.sampled_from(ALL_LAYOUTS)) for n in call.tensors}
    hold_layouts(call, layouts, data.draw(st.sampled_from(ALL_LAYOUTS)))


FLOAT8 = {"quantize_fp8", "scaled_matmul"}  # tests/test_scaled_matmul.py
ELSEWHERE = {  # arguments that ask for others: the op's own tests
    "rms_norm": {"quantize"},
    "rotary": {"rotary_dim", "position_ids", "offsets", "cu_seqlens", "mrope_section", "heads_dim"},
    "apply_rotary_pos_emb": {"mrope_section", "unsqueeze_dim"},
    "qk_norm_rotary": {"unsqueeze_dim"},
    "scaled_dot_product_attention": {"dropout_p", "enable_gqa"},
    "flash_attn_func": {"dropout_p"},
    "flash_attn_varlen_func": {"dropout_p", "block_table"},
    "flash_attn_with_kvcache": {"k", "v", "rotary_cos", "rotary_sin", "rotary_interleaved", "cache_batch_idx",
                                "cache_leftpad", "block_table"},
}  # fmt: skip


def values_of(call):
    """{argument: values} to draw from, besides the one that it has."""
    g, name = call.given, call.name
    x = next(t for t in g.values() if isinstance(t, torch.Tensor))
    new = lambda *shape: torch.randn(shape, dtype=torch.float64).to(x)  # noqa: E731
    positive = lambda n: torch.rand(n, dtype=torch.float64).to(x) + 0.5  # noqa: E731
    rows, columns, heads = x.shape[0], x.shape[-1], 2
    activations = ["relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "softplus", "mish"]
    values = {
        "dim": [0, -1], "keepdim": [True], "dtype": [torch.float32, torch.float64], "correction": [0, 2],
        "weight": [None, new(columns)], "bias": [None, new(columns)], "eps": [0.1], "offset": [1.0],
        "casting": ["before_weight"], "residual_dtype": [torch.float32], "negative_slope": [0.5],
        "approximate": ["tanh"], "threshold": [1.0], "activation": activations, "reduction": ["none", "mean", "sum"],
        "label_smoothing": [0.1], "z_loss": [0.01], "softcap": [3.0], "logit_scale": [0.5], "temperature": [2.0],
        "return_aux": [True], "precision": ["ieee"], "batch_invariant": [True], "out_dtype": [torch.float32],
        "gate_first": [False], "interleaved": [True], "inverse": [True], "limit": [2.0], "alpha": [1.7],
        "up_offset": [1.0], "mask": [None], "scale": [0.3], "norm_before_gate": [False],
        "group_size": [columns // 2], "shift": [None], "residual": [new(*x.shape)], "gate": [new(columns)],
        "softmax_scale": [0.1], "causal": [True], "window_size": [(1, 0), (0, 2)], "alibi_slopes": [positive(heads)],
        "deterministic": [True], "return_attn_probs": [True], "s_aux": [new(heads)], "renormalize": [True],
        "return_entropy": [True], "chunk_bytes": [2**11], "p": [0.3], "training": [False], "seed": [8],
        "num_splits": [1, 3], "return_softmax_lse": [True], "is_causal": [True], "ord": [1, 3.5, torch.inf, 0],
        "num_groups": [1, 8],
    }  # fmt: skip
    if name.startswith("reductions.") and name != "reductions.cumsum":
        values["dim"] = [0, None, (0, 1)] if "arg" not in name else [0, None]
    if name in ("linear", "matmul"):
        values.update(bias=[new(columns // 2)], residual=[new(rows, columns // 2)])
    if "target" in g or "labels" in inspect.signature(call.function).parameters:
        classes = columns // 2 if "linear_weight" in g else columns
        ids = g["target"] if "target" in g else torch.randint(columns, (rows,), device=x.device)
        values.update(weight=[positive(classes)], labels=[ids], ignore_index=[int(ids[0])])
        values.update(linear_bias=[new(classes)], beta=[0.1])
    own = {
        "group_norm": {"activation": [None, "silu", "gelu"]},
        "rms_norm_gated": {"activation": ["sigmoid", "gelu"]},
        "softplus": {"beta": [2.0]},
        "normalize": {"p": [1, 3.0, torch.inf], "dim": [0, (0, 1)], "eps": [3.0], "mode": ["rsqrt"]},
        "masked_softmax": {"causal": ["upper_left", "lower_right"]},
        "grouped_mm": {"bias": [new(2, columns // 2)], "offs": []},
        "scaled_dot_product_attention": {
            "attn_mask": [torch.rand(x.shape[-2], x.shape[-2], device=x.device) < 0.7, new(x.shape[-2], x.shape[-2])]
        },
        "flash_attn_with_kvcache": {"cache_seqlens": [torch.tensor([x.shape[1] - 1], device=x.device), x.shape[1]]},
    }
    return {**values, **own.get(name, {})}


def choices(call):
    """Of each argument that may be left out, or that is given but is no tensor: what to draw from."""
    parameters = inspect.signature(call.function).parameters.values()
    free = [p.name for p in parameters if p.default is not p.empty or p.name in ("activation", "dim", "reduction")]
    values = values_of(call)
    return {n: values.get(n) for n in free if n not in ELSEWHERE.get(call.name, ())}


def agree(ours, exact, share):
    ours, exact = ours.detach().cpu().double(), exact.detach().double()
    largest = max([1.0, *exact[exact.isfinite()].abs().flatten().tolist()])  # what flows in is of that size
    torch.testing.assert_close(ours, exact, rtol=share, atol=share * largest, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in FLOAT8])
def test_every_option_has_values(kernel, name):
    missing = [n for n, values in choices(Call(kernel, name, "cpu")).items() if values is None]
    assert not missing, "values_of has none to draw from"


@drawn(60)
@given(data=st.data())
def test_options(kernel, device, on_kernels, data):
    """Optional arguments of any op, several at once, and now and then an operand of another dtype: what PyTorch's path
    gives in float64, in the dtypes that it gives; or both refuse them, in the same words."""
    if not on_kernels:
        pytest.skip("the two are one")
    name = data.draw(st.sampled_from([n for n in NAMES if n not in FLOAT8]))
    dtypes = [torch.float64, torch.float32] if "topk" in name or "arg" in name else [torch.float64, *DTYPES]
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([64, 128, 192]))
    call = Call(kernel, name, device, data.draw(st.sampled_from(dtypes)), rows=rows, columns=columns)
    for key, values in choices(call).items():
        i = data.draw(st.integers(-2, len(values) - 1), label=key)
        if i >= 0:
            call.given[key] = values[i]
    for key in call.tensors:
        if call.given[key].is_floating_point() and data.draw(st.integers(0, 7)) == 7:
            call.given[key] = call.given[key].to(data.draw(st.sampled_from(DTYPES)))
    if call.given.get("interleaved") and "cos" in call.given:
        for key in ("cos", "sin"):
            call.given[key] = call.given[key].chunk(2, -1)[0].repeat_interleave(2, -1)
    hold_options(call)


def hold_options(call):
    same, exact = on_cpu(call, lambda dtype: dtype), on_cpu(call, lambda dtype: WIDE.get(dtype, dtype))
    found, refusal = run(call)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(call.kernel.__name__) and hasattr(module, "use_kernel"):
                patch.setattr(module, "use_kernel", lambda x: False)
        theirs, their_refusal = run(same)
        expected = run(exact)[0] if their_refusal is None else ()
    assert refusal == their_refusal
    assert [t if t is None else (t.dtype, t.shape) for t in found] == [
        t if t is None else (t.dtype, t.shape) for t in theirs
    ]
    # What another formula, in float64, may be off by: far less than an option that is not heeded.
    dtypes = [t.dtype for t in (*found, *call.given.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    share = max({torch.float64: 1e-9, torch.float32: 3e-4}.get(dtype, 0.06) for dtype in dtypes)
    for a, b in zip(found, expected, strict=True):
        if a is not None:
            agree(a, b, share)


WIDE = dict.fromkeys(DTYPES, torch.float64)


def on_cpu(call, dtype_of):
    """The call with other dtypes."""
    there = Call(call.kernel, call.name, "cpu", **call.sizes)
    for key, value in call.given.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", dtype_of(value.dtype))
        there.given[key] = dtype_of(value) if isinstance(value, torch.dtype) else value
    return there


def run(call):
    """(results and gradients, None), or ((), why the call is refused)."""
    call.names = leaves(call.name, call.given)
    tensors = call.inputs()
    try:
        results = call.function(**{**call.given, **dict(zip(call.names, tensors))})
    except (TypeError, ValueError, NotImplementedError) as error:
        return (), str(error)
    results = results if isinstance(results, tuple) else (results,)
    learn = [r for r in results if r is not None and r.requires_grad]
    grads = torch.autograd.grad(learn, tensors, into(learn), allow_unused=True) if learn else ()
    return (*results, *grads), None
