"""Kernels that attention's plan chooses for some sizes or devices: they compute what the portable one does."""

import pytest
import torch
from _inputs import tensor
from _numerics import assert_close

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def family(internals):
    return internals("attention")


@pytest.fixture(scope="module")
def forward(internals):
    return internals("_attention_fwd")


@pytest.fixture(scope="module")
def device_facts(internals):
    return internals("_device").Device


def make(B, Sq, Sk, H, Hk, D, dtype, device):
    return [tensor(s, dtype, device) for s in ((B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, D))]


def reference(family, q, k, v, **options):
    wide = {n: o.cpu().double() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    wide = family.flash_attn_func_reference(*(t.cpu().double() for t in (q, k, v)), return_attn_probs=True, **wide)
    return wide[0], wide[1]


def test_choice(forward, device_facts, monkeypatch):
    monkeypatch.setattr(forward, "GLUON", True)
    hopper = device_facts(132, 32, 232448, "H200", "sm90", True, True)
    older = device_facts(108, 32, 166912, "A100", "sm80", False, True)

    def kind(device, **changes):
        asked = {"rows": 4096, "block_d": 128, "itemsize": 2, "descriptors": True, "plain": True, **changes}
        return forward.plan_forward(device=device, **asked).kind

    assert kind(hopper) == kind(hopper, block_d=64) == "sm90"
    assert kind(hopper, plain=False) == kind(hopper, block_d=256) == kind(hopper, block_d=32) == "descriptor"
    assert kind(hopper, itemsize=4) == kind(hopper, descriptors=False) == kind(older, descriptors=False) == "pointer"
    assert kind(hopper, few=True) == kind(older, few=True) == "decode"
    monkeypatch.setattr(forward, "GLUON", False)
    assert kind(hopper) == "descriptor"


def test_choice_backward(internals, device_facts, monkeypatch):
    backward = internals("_attention_bwd")
    monkeypatch.setattr(backward, "GLUON", True)
    hopper = device_facts(132, 32, 232448, "H200", "sm90", True, True)

    def kind(device=hopper, block_d=128, extras="", descriptors=True, plain=True):
        plans = backward.plan_backward(4096, 4096, block_d, 2, extras, descriptors, device, plain)
        return {plan.kind for plan in plans}

    assert kind() == kind(block_d=64) == {"sm90"}
    assert (
        kind(plain=False)
        == kind(block_d=32)
        == kind(device_facts(148, 32, 232448, "B200", "sm100", True, True))
        == {"descriptor"}
    )
    assert kind(descriptors=False) == {"pointer"}
    monkeypatch.setattr(backward, "GLUON", False)
    assert kind() == {"descriptor"}


def test_masked_blocks(internals):
    """As many as there are blocks that the first query of a tile does not see all of, where tiles begin anywhere."""
    blocks = internals("_attention_fwd_sm90").masked_blocks

    def counted(block_m, offset, Sq, Sk):
        most = 0
        for row in range(0, Sq, block_m):
            seen = min(min(row + block_m, Sq) + offset, Sk)
            n = max((seen + 127) // 128, 1)
            most = max([most, *(n - j for j in range(n) if j * 128 + 127 > min(row + offset, Sk - 1))])
        return most

    for block_m in (128, 192):
        for Sq, Sk in ((1, 77), (128, 128), (200, 512), (512, 200), (777, 1000), (1024, 1024)):
            for offset in (0, Sk - Sq, Sk - Sq + 5, -3, 127):
                assert counted(block_m, offset, Sq, Sk) <= blocks(block_m, offset, Sk, True) <= 3
    assert [blocks(m, 0, 1024, True) for m in (128, 192)] == [1, 2]  # no more than need be
    assert [blocks(128, 0, S, False) for S in (1024, 1000)] == [0, 1]


@pytest.mark.parametrize("dtype", (torch.float32, *HALF))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (600, 0), "softcap": 3.0},
        {"window_size": (-1, 40), "s_aux": True},
        {"alibi_slopes": True, "causal": True},
    ],
    ids=str,
)
def test_few_queries(family, device, dtype, options):
    """Of which there are many keys: the kernel for decoding."""
    options = dict(options)
    for name in ("s_aux", "alibi_slopes"):
        if name in options:
            options[name] = torch.rand(4, device=device).to(dtype if name == "s_aux" else torch.float32)
    for B, Sq in ((1, 1), (2, 3)):
        q, k, v = make(B, Sq, 1100, 4, 2, 40, dtype, device)
        out, lse, _ = family.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        expected, expected_lse = reference(family, q, k, v, **options)
        assert_close(out, expected)
        assert_close(lse, expected_lse, slack=16 * torch.finfo(torch.float32).eps)


def test_few_queries_have_gradients(family, device):
    q, k, v = (t.requires_grad_() for t in make(1, 2, 1050, 2, 1, 16, torch.float32, device))
    dout = torch.randn_like(q)
    found = torch.autograd.grad(family.flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    wide = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(
        family.flash_attn_func_reference(*wide, causal=True), wide, dout.cpu().double()
    )  # fmt: skip
    for g, e in zip(found, expected):
        assert_close(g, e, dim=None)


@pytest.fixture
def on_hopper(forward, internals, device, on_kernels):
    if not on_kernels or internals("_device").facts(device).arch != "sm90" or not forward.GLUON:
        pytest.skip("needs a Hopper GPU and the Triton that its kernels are for")


HOPPER = [  # B, Sq, Sk, H, Hk, D, causal, top-left
    (1, 128, 128, 1, 1, 128, True, False),
    (2, 1, 77, 3, 1, 128, True, False),
    (1, 1024, 1024, 4, 2, 128, False, False),
    (2, 1000, 1111, 4, 1, 128, True, False),
    (1, 1111, 1000, 2, 2, 128, True, False),  # queries that see no key
    (1, 1111, 1000, 2, 2, 128, True, True),
    (1, 300, 1000, 2, 2, 128, True, True),
    (2, 777, 777, 6, 3, 64, True, False),
    (2, 640, 640, 6, 3, 64, False, False),
    (1, 4096, 4096, 8, 8, 64, False, False),  # three groups
    (1, 500, 640, 3, 3, 96, True, False),
    (1, 500, 640, 3, 3, 72, False, False),
    (40, 200, 200, 8, 8, 128, True, False),  # more tiles than multiprocessors
]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_hopper_agrees(family, forward, internals, device, on_hopper, monkeypatch, dtype, case):
    """With the float64 reference, with the portable kernel, and with itself, bit for bit; nothing is written beside."""
    B, Sq, Sk, H, Hk, D, causal, top_left = case
    q, k, v = make(B, Sq, Sk, H, Hk, D, dtype, device)
    if top_left:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        run = lambda: (family.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),)  # noqa: E731
    else:
        run = lambda: family.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[:2]  # noqa: E731
    found = run()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(found, run()))
    monkeypatch.setattr(forward, "GLUON", False)
    monkeypatch.setattr(internals("_replay"), "_compiling", lambda: True)  # not the call before again
    portable = run()
    wide = [t.cpu().double() for t in (q, k, v)]
    if top_left:
        expected = family.scaled_dot_product_attention_reference(*wide, is_causal=causal, enable_gqa=True), None
    else:
        expected = family.flash_attn_func_reference(*wide, causal=causal, return_attn_probs=True)
    for a, b, e in zip(found, portable, expected):
        assert_close(a, e, slack=2e-3 * (a.dim() == 3))  # the log of a sum: exp2 is approximate
        assert_close(b, e, slack=2e-3 * (a.dim() == 3))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", [c for c in HOPPER if c[1] < 4096], ids=str)
def test_hopper_gradients_agree(family, forward, internals, device, on_hopper, monkeypatch, dtype, case):
    """With the float64 reference as the portable kernels do, and with themselves, bit for bit.

    Each rounds P, dS and out to dtype. Where a query sees few keys its exact gradient is a small difference of large
    numbers, so one element may be off by more than its own size: what is held is the whole.
    """
    B, Sq, Sk, H, Hk, D, causal, top_left = case
    q, k, v = make(B, Sq, Sk, H, Hk, D, dtype, device)
    dout, dlse = torch.randn_like(q), torch.randn(B, H, Sq, device=device)
    common = None, None, None, None, None, None  # of the arguments that follow
    last = Sq, Sk, D**-0.5, -1, 0 if causal else -1, top_left, 0.0, 0.0
    out, lse = forward.attention_fwd._init_fn(q, k, v, None, *common, *last)
    dlse.masked_fill_(lse.isinf(), 0.0)  # of queries that see no key
    backward = internals("_attention_bwd")

    def run():
        return backward.attention_bwd._init_fn(q, k, v, dout, dlse, out, lse, *common, *last, False, False)[:3]

    found = run()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(found, run()))
    monkeypatch.setattr(backward, "GLUON", False)
    portable = run()
    wide = [t.cpu().double().requires_grad_() for t in (q, k, v)]
    seen = family._seen(Sq, Sk, 0 if top_left else Sk - Sq, -1, 0 if causal else -1, "cpu")
    results = family._reference(*wide, seen, D**-0.5, 0.0, None, None, None, 0.0)
    results = results[0], results[1].masked_fill(results[1].isinf(), 0.0)
    expected = torch.autograd.grad(results, wide, (dout.cpu().double(), dlse.cpu().double()))
    for a, b, e in zip(found, portable, expected):
        off, portable_off = (t.cpu().double() - e for t in (a, b))
        assert off.norm() <= torch.finfo(dtype).eps / 2 * e.norm() + torch.finfo(dtype).tiny
        assert off.norm() <= 1.25 * portable_off.norm() + torch.finfo(dtype).tiny
        assert off.abs().max() <= 2 * portable_off.abs().max() + torch.finfo(dtype).tiny


def test_hopper_gradients_surface_nan(family, device, on_hopper):
    """A NaN in a query shows in the gradients of the keys that it sees, and in those of no other query or head."""
    q, k, v = make(1, 400, 400, 2, 2, 128, torch.bfloat16, device)
    q[0, 200, 0, 3] = float("nan")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(family.flash_attn_func(*leaves, causal=True), leaves, torch.randn_like(q))
    assert dq[0, 200, 0].isnan().all() and not dq[0, :200].isnan().any() and not dq[0, 201:].isnan().any()
    for grad in (dk, dv):
        assert grad[0, :201, 0].isnan().any(-1).all() and not grad[0, :, 1].isnan().any()
    assert not dv[0, 201:].isnan().any()  # in dk a weight of 0 times that NaN may show


@pytest.mark.parametrize("causal", [False, True])
def test_hopper_strides_and_nan(family, device, on_hopper, causal):
    """(B, H, S, D) memory, slices of a projection; a NaN shows in the rows that see it, and in no others."""
    q = torch.randn(2, 4, 300, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
    k, v = torch.randn(2, 300, 2, 2, 128, device=device, dtype=torch.bfloat16).unbind(2)
    kept = [t.clone() for t in (q, k, v)]
    clean = family.flash_attn_func(q, k, v, causal=causal)
    assert_close(clean, reference(family, q, k, v, causal=causal)[0])
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v)))
    k[0, 200, 0, 5] = float("nan")
    out = family.flash_attn_func(q, k, v, causal=causal)
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[0, 200 if causal else 0 :, :2] = True
    assert out[seen].isnan().all() and torch.equal(out[~seen], clean[~seen])


def test_hopper_in_a_graph(family, device, on_hopper):
    """Two captured calls at once take their tiles from counters of their own."""
    q, k, v = make(2, 2048, 2048, 16, 16, 128, torch.bfloat16, device)
    expected = family.flash_attn_func(q, k, v, causal=True)
    graphs, outs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(family.flash_attn_func(q, k, v, causal=True))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("exponent", [-40, 40])
def test_hopper_any_scale(family, device, on_hopper, exponent):
    """bfloat16 values, and gradients, that float16 does not hold: by powers of two, the same bits."""
    q, k, v = (t.requires_grad_() for t in make(1, 300, 300, 4, 2, 128, torch.bfloat16, device))
    dout = torch.randn_like(q)
    out = family.flash_attn_func(q, k, v, causal=True)
    scaled = family.flash_attn_func(q, k, v * 2.0**exponent, causal=True)
    assert torch.equal(scaled, out * 2.0**exponent)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), dout * s, retain_graph=True) for s in (2.0**exponent, 1.0))):
        assert torch.equal(a, b * 2.0**exponent)
