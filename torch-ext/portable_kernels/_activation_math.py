"""The activation functions and their derivatives: in PyTorch for the references, in Triton for the kernels.

Each is named by a string, with up to two numbers a and b. Nearly equal numbers are subtracted only
where the function itself vanishes: sigmoid(x) and sigmoid(-x) come from exp(-|x|), tanh near 0 from a continued
fraction, log1p from a series, the normal distribution function from its tail. (The float64 gelu takes erf as it is.)
"""

import math

import torch
import torch.nn.functional as F

from ._triton import exp, tl, triton

# Every name that callers use: what the kernels call it, with a and b by default.
ACTIVATIONS = {
    "relu": ("relu", 0.0, 0.0),
    "relu_squared": ("relu_squared", 0.0, 0.0),
    "leaky_relu": ("leaky_relu", 0.01, 0.0),  # a: negative slope
    "silu": ("silu", 1.0, 0.0),  # x * sigmoid(a * x)
    "quick_gelu": ("silu", 1.702, 0.0),
    "gelu": ("gelu", 0.0, 0.0),
    "gelu_tanh": ("gelu_tanh", 0.0, 0.0),
    "sigmoid": ("sigmoid", 0.0, 0.0),
    "tanh": ("tanh", 0.0, 0.0),
    "softplus": ("softplus", 1.0, 20.0),  # a: beta, b: threshold
    "mish": ("mish", 0.0, 0.0),
    "hardswish": ("hardswish", 0.0, 0.0),
}

FORMULAS = {
    "relu": lambda x, a, b: F.relu(x),
    "relu_squared": lambda x, a, b: F.relu(x).square(),
    "leaky_relu": lambda x, a, b: F.leaky_relu(x, a),
    "silu": lambda x, a, b: F.silu(x) if a == 1.0 else x * torch.sigmoid(a * x),
    "gelu": lambda x, a, b: F.gelu(x),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "softplus": lambda x, a, b: F.softplus(x, a, b),
    "mish": lambda x, a, b: F.mish(x),
    "hardswish": lambda x, a, b: F.hardswish(x),
}


def gradient(activation, dy, x, a, b):
    """dy times the derivative of the activation at x, in closed form."""
    if activation == "relu":
        return torch.where(x <= 0, 0.0, dy)
    if activation == "relu_squared":
        return torch.where(x <= 0, 0.0, 2 * x * dy)
    if activation == "leaky_relu":
        return torch.where(x > 0, dy, a * dy)
    if activation == "silu":
        s = torch.sigmoid(a * x)
        return dy * (s + s * x * (a * torch.sigmoid(-a * x)))
    if activation == "gelu":
        pdf = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return dy * (torch.special.erfc(-x / math.sqrt(2)) / 2 + x * pdf)
    if activation == "gelu_tanh":
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        s = torch.sigmoid(2 * u)
        return dy * (s + x * s * torch.sigmoid(-2 * u) * 2 * du)
    if activation == "sigmoid":
        return dy * torch.sigmoid(x) * torch.sigmoid(-x)
    if activation == "tanh":
        return dy * 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)
    if activation == "softplus":
        return torch.where(a * x > b, dy, dy * torch.sigmoid(a * x))
    if activation == "mish":
        t = torch.tanh(F.softplus(x))
        return dy * (t + x * torch.sigmoid(x) * (1 - t * t))
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, dy, dy * (x / 3 + 0.5)))  # hardswish


@triton.jit
def _exp(t, rest, PRECISE: tl.constexpr):
    """exp(t + rest) of t <= 0 and small rest; rest is taken in by PRECISE alone.

    The float32 tl.exp rounds t * log2(e), which costs |t| / 2 ulps: PRECISE does not.
    """
    if PRECISE:
        t = tl.where(t < -110.0, -110.0, t)  # 0 by then, and no inf - inf; NaN passes
        n = tl.floor(t * 1.4426950408889634 + 0.5)
        t = (t - n * 0.693359375) + (n * 2.12194440e-4 + rest)  # ln 2 in two parts: n times the first is exact
        # tl.exp2 gives 0 below 2^-126 on NVIDIA: the product takes it from there.
        return tl.exp2(t * 1.4426950408889634) * tl.exp2(n + 64.0) * 5.421010862427522e-20
    else:
        return exp(t)


@triton.jit
def _reciprocal(y, PRECISE: tl.constexpr):
    """1 / y of y >= 1. For results of 16 bits by two instructions on NVIDIA, 2^-21 off; a division takes nine."""
    if PRECISE or y.dtype == tl.float64:
        return 1.0 / y
    else:
        r = tl.rsqrt(y)
        return r * r


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):
    if PRECISE or x.dtype == tl.float64:
        s, _ = _sigmoids(x, PRECISE)
        return s
    else:
        return _reciprocal(1.0 + exp(-x), PRECISE)


@triton.jit
def _sigmoids(x, PRECISE: tl.constexpr):
    """sigmoid(x) and sigmoid(-x)."""
    e = _exp(-tl.abs(x), 0.0, PRECISE)
    r = _reciprocal(1.0 + e, PRECISE)
    return tl.where(x < 0, e * r, r), tl.where(x < 0, r, e * r)


@triton.jit
def _tanh(x, PRECISE: tl.constexpr):
    if PRECISE or x.dtype == tl.float64:
        e = _exp(-2.0 * tl.abs(x), 0.0, PRECISE)
        z = x * x
        near = tl.abs(x) < 0.4  # Lambert's continued fraction: 1e-17 off there
        p = x * (135135.0 + z * (17325.0 + z * (378.0 + z)))
        q = 135135.0 + z * (62370.0 + z * (3150.0 + z * 28.0))
        return tl.where(near, p, tl.where(x < 0, e - 1.0, 1.0 - e)) / tl.where(near, q, 1.0 + e)
    else:  # 2^-16 off at most, on both sides of 2^-8
        return tl.where(tl.abs(x) < 0.00390625, x, 1.0 - 2.0 * _reciprocal(1.0 + exp(2.0 * x), PRECISE))


@triton.jit
def _log1p(e, PRECISE: tl.constexpr):
    """log(1 + e) of 0 <= e <= 1, as 2 artanh(s) with s = e / (2 + e) <= 1/3. For 16 bits a minimax fit, 2^-16 off."""
    if PRECISE or e.dtype == tl.float64:
        TERMS: tl.constexpr = 17 if e.dtype == tl.float64 else 7
        s = e * _reciprocal(2.0 + e, PRECISE)
        z = s * s
        total = z * 0.0
        for k in tl.static_range(TERMS):
            total = total * z + 1.0 / (2 * (TERMS - k) - 1)
        return 2.0 * s * total
    else:
        p = 1.01222299e-1 - 2.38691532e-2 * e
        p = 3.25206697e-1 + e * (-2.10048720e-1 + e * p)
        return e * (9.99991596e-1 + e * (-4.99361366e-1 + e * p))


@triton.jit
def _normal(x, PRECISE: tl.constexpr):
    """(Phi(x), exp(-x^2 / 2)), Phi the normal distribution function."""
    if x.dtype == tl.float64:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)), tl.exp(-0.5 * x * x)
    else:
        w = tl.abs(x)
        w = tl.where(w > 16.0, 16.0, w)  # Phi(-w) is 0 there; NaN passes
        if PRECISE:
            h = tl.floor(w * 16.0) * 0.0625  # its square is exact
            e = _exp(-0.5 * h * h, -0.5 * (w - h) * (w + h), PRECISE)
        else:
            e = exp(-0.5 * w * w)
        # Phi(-w) / exp(-w^2 / 2) by a minimax fit in t, 2.2e-8 off at most: half the work of tl.erf, and the left tail
        # keeps its relative accuracy.
        t = _reciprocal(1.0 + 0.345 * w, PRECISE)
        q = -2.70352781e-1 + t * (1.44856125e-1 + t * -2.82884408e-2)
        q = 1.11583084e-1 + t * (-3.70471664e-2 + t * (1.86326325e-1 + t * q))
        q = e * (t * (1.3761963e-1 + t * (1.38014495e-1 + t * (1.17288724e-1 + t * q))))
        return tl.where(x < 0, q, 1.0 - q), e


@triton.jit
def _normal_logit(w):
    """log2(Phi(w) / Phi(-w)) / w of w >= 0, Phi the normal distribution function.

    A minimax fit up to 13.5: Phi(-w) is 4e-4 of itself off up to 6, 5e-3 up to 13, where it is 1e-38. For results of
    16 bits, in two thirds of the instructions of `_normal`.
    """
    w = tl.minimum(w, 13.5)
    s = 1.13811899e-8 * w - 7.66589744e-7
    s = s * w + 2.18819610e-5
    s = s * w - 3.42937015e-4
    s = s * w + 3.17236399e-3
    s = s * w - 1.68973747e-2
    s = s * w + 4.05355006e-2
    s = s * w + 5.73727435e-2
    s = s * w + 2.40313055e-2
    return s * w + 2.29882461


@triton.jit
def _gelu_tanh_argument(x):
    """v = 2 sqrt(2/pi) (x + 0.044715 x^3) and dv/dx; sigmoid(v) is 0 or 1 long before |x| = 64."""
    x = tl.where(x > 64.0, 64.0, tl.where(x < -64.0, -64.0, x))
    z = x * x
    return 1.5957691216057308 * x * (1.0 + 0.044715 * z), 1.5957691216057308 * (1.0 + 0.134145 * z)


@triton.jit
def activate(x, a, b, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """activation(x). PRECISE where the result keeps all digits of float32; x may be float64 without it."""
    if ACTIVATION == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        y = tl.where(x <= 0, 0.0, x * x)
    elif ACTIVATION == "leaky_relu":
        y = tl.where(x > 0, x, x * a)
    elif ACTIVATION == "silu":
        y = x * _sigmoid(a * x, PRECISE)
    elif ACTIVATION == "gelu":
        if PRECISE or x.dtype == tl.float64:
            phi, _ = _normal(x, PRECISE)
            y = x * phi
        else:
            y = x * _reciprocal(1.0 + tl.exp2(-x * _normal_logit(tl.abs(x))), PRECISE)
    elif ACTIVATION == "gelu_tanh":
        v, _ = _gelu_tanh_argument(x)
        y = x * _sigmoid(v, PRECISE)
    elif ACTIVATION == "sigmoid":
        y = _sigmoid(x, PRECISE)
    elif ACTIVATION == "tanh":
        y = _tanh(x, PRECISE)
    elif ACTIVATION == "softplus":
        z = a * x
        # A float64 constant in a comparison would be compared as float32: hence tl.full.
        y = tl.where(z > 0, z, 0.0) + _log1p(_exp(-tl.abs(z), 0.0, PRECISE), PRECISE)
        y = y / a if PRECISE or x.dtype == tl.float64 else y * (1.0 / a)
        y = tl.where(z > tl.full((1, 1), b, z.dtype), x, y)
    elif ACTIVATION == "mish":
        e = _exp(-tl.abs(x), 0.0, PRECISE)
        num, den = _mish_tanh(x, e)
        y = x * (num * _reciprocal(den, PRECISE))
    else:
        tl.static_assert(ACTIVATION == "hardswish")
        t = x + 3.0
        y = x * (tl.where(t < 0, 0.0, tl.where(t > 6.0, 6.0, t)) / 6.0)
    return y


@triton.jit
def _mish_tanh(x, e):
    """tanh(softplus(x)) as numerator and denominator, from e = exp(-|x|)."""
    return tl.where(x > 0, 1.0 + 2.0 * e, e * (e + 2.0)), tl.where(
        x > 0, 1.0 + 2.0 * e * (1.0 + e), e * (e + 2.0) + 2.0
    )


@triton.jit
def activate_gradient(dy, x, a, b, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """dy times the derivative of activation at x. What it shares with `activate` is computed once by the compiler."""
    if ACTIVATION == "relu":
        dx = tl.where(x <= 0, 0.0, dy)
    elif ACTIVATION == "relu_squared":
        dx = tl.where(x <= 0, 0.0, 2.0 * x * dy)
    elif ACTIVATION == "leaky_relu":
        dx = tl.where(x > 0, dy, dy * a)
    elif ACTIVATION == "silu":
        if PRECISE or x.dtype == tl.float64:
            s, t = _sigmoids(a * x, PRECISE)
        else:  # what 1 - s loses where s is near 1 is small beside the 1 that it is added to
            s = _sigmoid(a * x, PRECISE)
            t = 1.0 - s
        dx = dy * (s + (s * x) * (a * t))  # s * x: a * x may overflow where s is 0
    elif ACTIVATION == "gelu":
        phi, e = _normal(x, PRECISE)
        dx = dy * (phi + x * (0.3989422804014327 * e))
    elif ACTIVATION == "gelu_tanh":
        v, dv = _gelu_tanh_argument(x)
        s, t = _sigmoids(v, PRECISE)
        dx = dy * (s + x * (s * t) * dv)
    elif ACTIVATION == "sigmoid":
        s, t = _sigmoids(x, PRECISE)
        dx = dy * (s * t)
    elif ACTIVATION == "tanh":
        s, t = _sigmoids(2.0 * x, PRECISE)
        dx = dy * (4.0 * s * t)
    elif ACTIVATION == "softplus":
        s = _sigmoid(a * x, PRECISE)
        dx = tl.where(a * x > tl.full((1, 1), b, x.dtype), dy, dy * s)
    elif ACTIVATION == "mish":
        e = _exp(-tl.abs(x), 0.0, PRECISE)
        num, den = _mish_tanh(x, e)
        k = 4.0 * (1.0 + e) * e * tl.where(x > 0, e, 1.0)  # sigmoid(x) * (1 - tanh^2) * den^2
        r = _reciprocal(den, PRECISE)
        dx = dy * ((num + x * k * r) * r)
    else:
        tl.static_assert(ACTIVATION == "hardswish")
        dx = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, dy, dy * (x / 3.0 + 0.5)))
    return dx
