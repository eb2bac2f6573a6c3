"""What `sweep.py` measures: an op, its inputs at the sizes of models, PyTorch's way to do it, and its traffic."""

import functools
import math
from typing import Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F

DEVICE, DTYPE = "cuda", torch.bfloat16  # tools/portability.py sets others


class Workload(NamedTuple):
    """One op. A shape is what `make` takes; all ways take (what `make` returns), ours the package before them."""

    make: Callable
    ours: Callable
    torch: Callable
    cases: dict  # name: shape
    tiny: tuple  # the shape at which the host's share of a call is all there is to measure
    forward: Optional[Callable] = None  # shape -> bytes read and written, None: not measured
    backward: Optional[Callable] = None
    flops: Optional[Callable] = None  # shape -> of the forward; the measure is then TFLOP/s
    backward_flops: float = 0.0  # of the backward, as a multiple of the forward's; 0: not measured
    exact: Optional[Callable] = None  # what results are held against, on float32 inputs; None: `torch`
    grads: tuple = (0,)  # the inputs with gradients
    peers: dict = {}  # name: () -> way, which may fail where it is not installed
    reads: bool = False  # whether the forward writes next to nothing: it is held against a read too
    early: tuple = ()  # peers whose forward makes the gradients: their backward alone says nothing


def rand(*shape):
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


LINEAR = {
    "1 x 4096 x 4096": (1, 4096, 4096), "16 x 4096 x 4096": (16, 4096, 4096), "64 x 14336 x 4096": (64, 14336, 4096),
    "256 x 4096 x 14336": (256, 4096, 14336), "1024 x 4096 x 4096": (1024, 4096, 4096),
    "4096 x 4096 x 4096": (4096, 4096, 4096), "8192 x 8192 x 8192": (8192, 8192, 8192),
    "8192 x 14336 x 4096": (8192, 14336, 4096), "8192 x 4096 x 14336": (8192, 4096, 14336),
    "16384 x 1024 x 1024": (16384, 1024, 1024), "2048 x 128256 x 4096": (2048, 128256, 4096),
    "1823 x 781 x 513": (1823, 781, 513),
}  # fmt: skip
# batch, heads of queries, heads of keys, tokens, head dimension
ATTENTION = {
    "4 x 32 x 4096, 128": (4, 32, 32, 4096, 128), "2 x 32/8 x 8192, 128": (2, 32, 8, 8192, 128),
    "1 x 32 x 16384, 128": (1, 32, 32, 16384, 128), "8 x 16 x 4096, 64": (8, 16, 16, 4096, 64),
    "4 x 24 x 4096, 64": (4, 24, 24, 4096, 64), "16 x 32 x 1024, 128": (16, 32, 32, 1024, 128),
    "64 x 32 x 512, 128": (64, 32, 32, 512, 128),
}  # fmt: skip


def _products(shape):
    M, N, K = shape
    return 2 * M * N * K


def _linear(M, N, K):
    return rand(M, K), rand(N, K) * K**-0.5


def _linear_bias(M, N, K):
    return (*_linear(M, N, K), rand(N))


def _gated_linear(M, N, K):
    return (*_linear(M, N, K), rand(N, K) * K**-0.5)


def _float8(M, N, K):
    a, b = _linear(M, N, K)
    one = torch.ones((), device=DEVICE)
    return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), one, one


def _scaled_mm(fast):
    return lambda a, b, sa, sb: torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _experts(T, E, N, K):
    ends = torch.rand(E - 1, device=DEVICE).sort().values.mul(T // 8).int() * 8
    return rand(T, K), rand(E, K, N) * K**-0.5, torch.cat((ends, ends.new_full((1,), T)))


def _grouped_mm(a, b, offs):
    if a.dtype == torch.bfloat16:
        return torch._grouped_mm(a, b, offs)
    ends = [0, *offs.tolist()]
    return torch.cat([a[i:j] @ w for i, j, w in zip(ends, ends[1:], b)])


def _attention(B, HQ, HK, S, D):
    return rand(B, HQ, S, D), rand(B, HK, S, D), rand(B, HK, S, D)


def _sdpa(causal, backend=None):
    def way(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    def only(*qkv):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return way(*qkv)

    return way if backend is None else only


def _attention_exact(causal):
    def way(q, k, v):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return way


def _cache(B, HQ, HK, S, D):
    return rand(B, 1, HQ, D), rand(B, S, HK, D), rand(B, S, HK, D)


def _decode(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def streams(count, itemsize=2):
    """Bytes of so many tensors of the shape."""
    return lambda shape: count * itemsize * math.prod(shape)


WIDTHS = {f"{2**27 // n} x {n}": (2**27 // n, n) for n in (2**i for i in range(7, 19))}
MLP = {"llama3_8b": (16384, 14336), "bert_large": (32768, 4096)}
LOGITS = {"llama2_7b": (8388, 32000), "llama3_8b": (2092, 128256), "gemma3": (1024, 262144)}


def _liger_rms_norm():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)


def _liger_softmax():
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def _liger_layer_norm():
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)


def _liger_swiglu():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


def _liger_cross_entropy():
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # It writes the gradient into its input, hence the clone. The other arguments are its defaults.
    return lambda x, t: LigerCrossEntropyFunction.apply(x.clone() if x.requires_grad else x, t, None)[0]


def _differentiable(forward, backward):
    """A peer's two functions as one: forward(*inputs) gives the result and what backward(dy, ...) takes after dy."""

    class Way(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            y, *kept = forward(*inputs)
            ctx.save_for_backward(*kept)
            return y

        @staticmethod
        def backward(ctx, dy):
            return backward(dy, *ctx.saved_tensors)

    return Way.apply


def _quack_rms_norm():
    from quack import rmsnorm

    return lambda x, w: rmsnorm(x, w, eps=1e-6)


def _quack_add_rms_norm():
    from quack import rmsnorm

    return lambda x, r, w: rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True)


def _quack_layer_norm():
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    def forward(x, w, b):
        y, rstd, mean = layernorm_fwd(x, float32(w), float32(b), 1e-5, return_rstd=True, return_mean=True)
        return y, x, float32(w), rstd, mean

    # It takes weights in float32 alone; in a model they would be so.
    float32 = functools.lru_cache(4)(torch.Tensor.float)
    return _differentiable(forward, lambda dy, x, w, rstd, mean: layernorm_bwd(x, w, dy, rstd, mean))


def _quack_softmax():
    from quack import softmax

    return softmax


def _quack_topk_softmax():
    from quack.topk import topk

    return lambda x: topk(x, 8, softmax=True)[0]


def _quack_cross_entropy():
    from quack import cross_entropy

    return lambda x, t: cross_entropy(x, t, reduction="mean")


def _tokens_first(rotary):
    """A rotary embedding of one tensor (B, S, H, D), with half of the angles of a sequence, as one of ours."""

    def way(q, k, cos, sin):
        cos, sin = (t[0, :, : t.shape[-1] // 2] for t in (cos, sin))
        return tuple(rotary(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))

    return way


def _quack_rotary():
    from quack.rotary import apply_rotary_emb

    return _tokens_first(apply_rotary_emb)


def _gems_softmax(name="softmax"):
    import flag_gems

    forward, backward = getattr(flag_gems.ops, name), getattr(flag_gems.ops, f"{name}_backward")
    return _differentiable(lambda x: [forward(x, -1)] * 2, lambda dy, y: backward(dy, y, -1, y.dtype))


def _gems_rms_norm():
    from flag_gems.ops import rms_norm

    return lambda x, w: rms_norm(x, w.shape, w, 1e-6)


def _gems_layer_norm():
    from flag_gems.ops import layer_norm, layer_norm_backward

    def forward(x, w, b):
        y, mean, rstd = layer_norm(x, w.shape, w, b, 1e-5)
        return y, x, mean, rstd, w, b

    def backward(dy, x, mean, rstd, w, b):
        return layer_norm_backward(dy, x, w.shape, mean, rstd, w, b, [True] * 3)

    return _differentiable(forward, backward)


def _gems_pointwise(name, of_result=False):
    """One input; the gradient is of it, or of the result."""
    import flag_gems

    forward, backward = getattr(flag_gems.ops, name), getattr(flag_gems.ops, f"{name}_backward")
    if of_result:
        return _differentiable(lambda x: [forward(x)] * 2, backward)
    return _differentiable(lambda x: (forward(x), x), backward)


def _gems_swiglu():
    from flag_gems.fused import silu_and_mul

    return silu_and_mul


def _gems_dropout():
    from flag_gems.ops import dropout, dropout_backward

    def forward(x):
        y, mask = dropout(x, 0.1)
        return y, mask

    return _differentiable(forward, lambda dy, mask: dropout_backward(dy, mask, 1 / 0.9))


def _gems_cross_entropy():
    from flag_gems.fused import cross_entropy_loss

    return cross_entropy_loss


def _gems_rotary():
    from flag_gems.fused import apply_rotary_pos_emb

    def way(q, k, cos, sin):
        cos, sin = (t[0, :, : t.shape[-1] // 2] for t in (cos, sin))
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return way


def _gems_reduction(name, dim):
    import flag_gems

    reduce = getattr(flag_gems.ops, {"sum": "sum_dim"}.get(name, name))
    return lambda x: reduce(x, dim if name in ("argmax", "cumsum") else [dim])


def _fla_rms_norm():
    from fla.modules.norm.layernorm import rms_norm

    return lambda x, w: rms_norm(x, w, None, eps=1e-6)


def _fla_add_rms_norm():
    from fla.modules.norm.layernorm import rms_norm

    return lambda x, r, w: rms_norm(x, w, None, r, eps=1e-6, prenorm=True)


def _fla_layer_norm():
    from fla.modules.norm.layernorm import layer_norm

    return layer_norm


def _fla_rms_norm_gated():
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return lambda x, g, w: rms_norm_gated(x, g, w, None)


def _fla_activation(name):
    import fla.modules.activations

    return getattr(fla.modules.activations, name)


def _fla_normalize():
    from fla.modules.norm.l2norm import l2norm

    return l2norm


def _fla_rotary():
    from fla.modules.rotary import rotary_embedding

    return _tokens_first(rotary_embedding)


def _fla_cross_entropy():
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    return lambda x, t: cross_entropy_loss(x, t)[0].mean()


def _rotary(q, k, cos, sin):
    def one(x):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return one(q), one(k)


def _make_rotary(B, S, HQ, HK, D):
    angles = torch.arange(S, device=DEVICE)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, device=DEVICE) / D)
    angles = torch.cat((angles, angles), -1).expand(B, S, D)
    q, k = (rand(B, S, H, D).transpose(1, 2) for H in (HQ, HK))
    return q, k, angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def _rms_norm(x, w):
    return F.rms_norm(x, w.shape, w, 1e-6)


def _distillation(x, teacher):
    return F.kl_div(x.float().log_softmax(-1), teacher.float().log_softmax(-1), log_target=True, reduction="batchmean")


ACTIVATIONS = {
    "silu": {"gems": lambda: _gems_pointwise("silu"), "fla": lambda: _fla_activation("swish")},
    "gelu": {"gems": lambda: _gems_pointwise("gelu")},
    "tanh": {"gems": lambda: _gems_pointwise("tanh", of_result=True)},
    "sigmoid": {
        "gems": lambda: _gems_pointwise("sigmoid", of_result=True), "fla": lambda: _fla_activation("sigmoid"),
    },
    "relu_squared": {"fla": lambda: _fla_activation("sqrelu")},
}  # fmt: skip
WORKLOADS = {
    "softmax": Workload(
        lambda *s: (rand(*s),), lambda k, x: k.softmax(x, -1), lambda x: torch.softmax(x, -1), WIDTHS, (1, 256),
        streams(2), streams(3), peers={"liger": _liger_softmax, "quack": _quack_softmax, "gems": _gems_softmax},
    ),
    "log_softmax": Workload(
        lambda *s: (rand(*s),), lambda k, x: k.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1),
        WIDTHS, (1, 256), streams(2), streams(3), peers={"gems": lambda: _gems_softmax("log_softmax")},
    ),
    "masked_softmax": Workload(
        lambda B, H, Q, K: (rand(B, H, Q, K), (torch.rand(B, 1, Q, K, device=DEVICE) < 0.9)),
        lambda k, x, m: k.masked_softmax(x, m), lambda x, m: torch.softmax(x.masked_fill(~m, float("-inf")), -1),
        {"bert_large": (16, 16, 512, 512), "long": (1, 16, 4096, 4096)}, (1, 1, 1, 64), streams(2), streams(3),
    ),
    "topk_softmax": Workload(
        lambda *s: (torch.rand(s, device=DEVICE).argsort(-1).to(DTYPE) / 16,),  # no ties: any of them may be chosen
        lambda k, x: k.topk_softmax(x, 8, renormalize=True)[0],
        lambda x: (lambda v: v / v.sum(-1, keepdim=True))(torch.softmax(x.float(), -1).topk(8).values).to(x.dtype),
        {"qwen3_moe": (131072, 128), "deepseek": (131072, 256)}, (1, 128), streams(1), streams(2),
        peers={"quack": _quack_topk_softmax},
    ),
    "rms_norm": Workload(
        lambda *s: (rand(*s), rand(s[-1])), lambda k, x, w: k.rms_norm(x, w, eps=1e-6), _rms_norm,
        WIDTHS, (1, 256), streams(2), streams(3), grads=(0, 1),
        peers={
            "liger": _liger_rms_norm, "quack": _quack_rms_norm, "gems": _gems_rms_norm, "fla": _fla_rms_norm,
        },
    ),
    "add_rms_norm": Workload(
        lambda *s: (rand(*s), rand(*s), rand(s[-1])), lambda k, x, r, w: k.add_rms_norm(x, r, w, eps=1e-6),
        lambda x, r, w: (_rms_norm(x + r, w), x + r),
        WIDTHS, (1, 256), streams(4), streams(4), grads=(0, 1, 2),
        peers={"quack": _quack_add_rms_norm, "fla": _fla_add_rms_norm},
    ),
    "layer_norm": Workload(
        lambda *s: (rand(*s), rand(s[-1]), rand(s[-1])), lambda k, x, w, b: k.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b), WIDTHS, (1, 256), streams(2), streams(3), grads=(0, 1, 2),
        peers={
            "liger": _liger_layer_norm, "quack": _quack_layer_norm, "gems": _gems_layer_norm, "fla": _fla_layer_norm,
        },
    ),
    "rms_norm_gated": Workload(
        lambda *s: (rand(*s), rand(*s), rand(s[-1])), lambda k, x, g, w: k.rms_norm_gated(x, g, w),
        lambda x, g, w: _rms_norm(x, w) * F.silu(g), {"qwen3_next": (524288, 128), "mamba2": (32768, 4096)}, (1, 128),
        streams(3), streams(5), grads=(0, 1, 2), peers={"fla": _fla_rms_norm_gated},
    ),
    "modulated_layer_norm": Workload(
        lambda B, S, N: (rand(B, S, N), rand(B, 1, N), rand(B, 1, N)),
        lambda k, x, scale, shift: k.modulated_layer_norm(x, scale, shift),
        lambda x, scale, shift: F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift,
        {"flux": (4, 4608, 3072), "dit_xl": (64, 1024, 1152)}, (1, 1, 256), streams(2), streams(3), grads=(0, 1, 2),
    ),
    "group_norm": Workload(
        lambda B, C, H: (rand(B, C, H, H), rand(C), rand(C)),
        lambda k, x, w, b: k.group_norm(x, 32, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), {"sdxl": (8, 320, 128), "vae": (2, 256, 512)}, (1, 32, 4),
        lambda s: 4 * s[0] * s[1] * s[2] ** 2, lambda s: 6 * s[0] * s[1] * s[2] ** 2, grads=(0, 1, 2),
    ),
    "normalize": Workload(
        lambda *s: (rand(*s),), lambda k, x: k.normalize(x), F.normalize,
        {"embeddings": (131072, 1024), "heads": (2**20, 128)}, (1, 256), streams(2), streams(3),
        peers={"fla": _fla_normalize},
    ),
    **{
        name: Workload(
            lambda *s: (rand(*s),), lambda k, x, name=name: getattr(k, name)(x), way, MLP, (256,), streams(2),
            streams(3), peers=ACTIVATIONS.get(name, {}),
        )
        for name, way in {
            "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
            "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softplus": F.softplus, "mish": F.mish,
            "hardswish": F.hardswish, "relu_squared": lambda x: F.relu(x).square(),
        }.items()
    },
    "swiglu": Workload(
        lambda *s: (rand(*s), rand(*s)), lambda k, g, u: k.swiglu(g, u), lambda g, u: F.silu(g) * u, MLP, (256,),
        streams(3), streams(5), grads=(0, 1),
        peers={"liger": _liger_swiglu, "gems": _gems_swiglu, "fla": lambda: _fla_activation("swiglu")},
    ),
    "silu_and_mul": Workload(
        lambda M, N: (rand(M, 2 * N),), lambda k, x: k.silu_and_mul(x),
        lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :], {"llama3_8b": (8192, 14336)},
        (1, 256), streams(3), streams(5),
    ),
    "bias_act": Workload(
        lambda M, N: (rand(M, N), rand(N)), lambda k, x, b: k.bias_act(x, b, "gelu"), lambda x, b: F.gelu(x + b), MLP,
        (1, 256), streams(2), streams(3), grads=(0, 1),
    ),
    "residual_scale_add": Workload(
        lambda M, N: (rand(M, N), rand(M, N), rand(N)), lambda k, x, r, s: k.residual_scale_add(x, r, s),
        lambda x, r, s: r + x * s, {"vit_g": (65536, 1408)}, (1, 256), streams(3), streams(3), grads=(0, 1, 2),
    ),
    "dropout": Workload(
        lambda *s: (rand(*s),), lambda k, x: k.dropout(x, 0.1), lambda x: F.dropout(x, 0.1), MLP, (256,),
        streams(2), streams(2), peers={"gems": _gems_dropout},
    ),
    "apply_rotary_pos_emb": Workload(
        _make_rotary, lambda k, *a: k.apply_rotary_pos_emb(*a), _rotary,
        {"llama3_8b": (2, 8192, 32, 8, 128), "pythia": (8, 2048, 40, 40, 64)}, (1, 1, 2, 2, 64),
        lambda s: 4 * s[0] * s[1] * (s[2] + s[3]) * s[4], lambda s: 4 * s[0] * s[1] * (s[2] + s[3]) * s[4],
        grads=(0, 1), peers={"quack": _quack_rotary, "gems": _gems_rotary, "fla": _fla_rotary},
    ),
    "cross_entropy": Workload(
        lambda T, V: (rand(T, V), torch.randint(0, V, (T,), device=DEVICE)), lambda k, x, t: k.cross_entropy(x, t),
        F.cross_entropy, LOGITS, (4, 256), streams(1), streams(2),
        peers={
            "liger": _liger_cross_entropy, "quack": _quack_cross_entropy, "gems": _gems_cross_entropy,
            "fla": _fla_cross_entropy,
        },
        reads=True, early=("liger",),
    ),
    "distillation_kl": Workload(
        lambda T, V: (rand(T, V), rand(T, V)), lambda k, x, t: k.distillation_kl(x, t), _distillation,
        {"llama3_8b": (2092, 128256)}, (4, 256), streams(2), streams(3), reads=True,
    ),
    **{
        f"reductions.{name}{suffix}": Workload(
            lambda *s: (rand(*s),), lambda k, x, name=name, dim=dim: getattr(k.reductions, name)(x, dim),
            lambda x, name=name, dim=dim: getattr(torch, name)(x, dim), cases, (4, 256), streams(1),
            streams(2) if name in ("logsumexp", "var") else None, reads=True,
            peers={} if name == "logsumexp" else {"gems": lambda name=name, dim=dim: _gems_reduction(name, dim)},
        )
        for name, suffix, dim, cases in (
            ("sum", " of rows", -1, {"32768 x 4096": (32768, 4096), "16 x 8388608": (16, 2**23)}),
            ("sum", " of columns", 0, {"32768 x 4096": (32768, 4096), "8388608 x 16": (2**23, 16)}),
            ("amax", " of rows", -1, {"32768 x 4096": (32768, 4096)}),
            ("argmax", " of rows", -1, {"32768 x 4096": (32768, 4096), "2092 x 128256": (2092, 128256)}),
            ("var", " of rows", -1, {"32768 x 4096": (32768, 4096)}),
            ("logsumexp", " of rows", -1, {"2092 x 128256": (2092, 128256)}),
        )
    },
    "reductions.cumsum": Workload(
        lambda *s: (rand(*s),), lambda k, x: k.reductions.cumsum(x, -1), lambda x: torch.cumsum(x, -1),
        {"32768 x 4096": (32768, 4096), "16 x 8388608": (16, 2**23)}, (4, 256), streams(2),
        peers={"gems": lambda: _gems_reduction("cumsum", -1)},
    ),
    "linear": Workload(
        _linear, lambda k, x, w: k.linear(x, w), F.linear, LINEAR, (4, 64, 64), flops=_products, backward_flops=2.0,
        grads=(0, 1),
    ),
    "linear with bias and gelu": Workload(
        _linear_bias, lambda k, x, w, b: k.linear(x, w, b, activation="gelu"),
        lambda x, w, b: F.gelu(F.linear(x, w, b)), LINEAR, (4, 64, 64), flops=_products, backward_flops=2.0,
        grads=(0, 1, 2),
    ),
    "gated_linear": Workload(
        _gated_linear, lambda k, *a: k.gated_linear(*a), lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        LINEAR, (4, 64, 64), flops=lambda s: 2 * _products(s), backward_flops=2.0, grads=(0, 1, 2),
    ),
    **{
        f"scaled_matmul, {name}": Workload(
            _float8, lambda k, *a, fast=fast: k.scaled_matmul(*a, fast_accum=fast), _scaled_mm(fast),
            {n: s for n, s in LINEAR.items() if s[0] % 16 == 0}, (16, 64, 64), flops=_products, grads=(),
            exact=lambda a, b, sa, sb: a @ b,
        )
        for name, fast in (("fast", True), ("accurate", False))
    },
    "grouped_mm": Workload(
        _experts, lambda k, a, b, offs: k.grouped_mm(a, b, offs=offs), _grouped_mm,
        {"mixtral": (8192, 8, 14336, 4096), "qwen3_moe": (16384, 128, 768, 2048)}, (16, 2, 64, 64),
        flops=lambda s: 2 * s[0] * s[2] * s[3], backward_flops=2.0, grads=(0, 1),
    ),
    **{
        f"attention{', causal' * causal}": Workload(
            _attention,
            lambda k, q, key, v, causal=causal: k.scaled_dot_product_attention(
                q, key, v, is_causal=causal, enable_gqa=q.shape[1] != key.shape[1]
            ),
            _sdpa(causal), ATTENTION, (1, 2, 2, 64, 64),
            flops=lambda s, causal=causal: 4 * s[0] * s[1] * s[3] ** 2 * s[4] // (1 + causal), backward_flops=2.5,
            grads=(0, 1, 2), exact=_attention_exact(causal),
            peers={
                "cudnn": lambda causal=causal: _sdpa(causal, "CUDNN_ATTENTION"),
                "flash2": lambda causal=causal: _sdpa(causal, "FLASH_ATTENTION"),
            },
        )
        for causal in (False, True)
    },
    "flash_attn_with_kvcache": Workload(
        _cache, lambda k, q, key, v: k.flash_attn_with_kvcache(q, key, v), _decode,
        {
            "llama3_8b, 64 x 8192": (64, 32, 8, 8192, 128), "llama3_8b, 8 x 32768": (8, 32, 8, 32768, 128),
            "llama3_8b, 1 x 131072": (1, 32, 8, 131072, 128), "gemma, 8 x 32768": (8, 8, 4, 32768, 256),
        },
        (1, 2, 2, 64, 64), forward=lambda s: 4 * s[0] * s[2] * s[3] * s[4], grads=(), reads=True,
    ),
}  # fmt: skip
