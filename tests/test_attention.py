import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, few, tensor, vast
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")

# Weights and their gradients are rounded to the operands' 16 bits before the second product, and so is the result that
# the gradients subtract: a few more roundings than the policy's two.
ULPS = {torch.float64: None, torch.float32: 32, torch.float16: 6, torch.bfloat16: 6}
# A gradient of a score is a difference of two numbers of the order of v, of which float32 keeps so much.
CANCELS = 16 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def family(internals):
    return internals("attention")


@pytest.fixture
def fixed_seed(family, monkeypatch):
    """The same dropout mask in every call and on every device."""
    monkeypatch.setattr(family, "_seed", lambda q, p: torch.tensor(77, device=q.device) if p else None)


def qkv(B, Sq, Sk, H, Hk, D, dtype=torch.float32, device="cpu", DV=None, layout="contiguous"):
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, DV or D)
    return [tensor(s, dtype, device, layout) for s in shapes]


@pytest.fixture
def hold(family):
    """Hold flash_attn_func and all gradients, those of lse and of sinks among them, against the float64 reference."""

    def hold(q, k, v, s_aux=None, grads=None, **options):
        def run(function):
            def call(q, k, v, s_aux):
                out, lse, _ = function(q, k, v, s_aux=s_aux, return_attn_probs=True, **options_of(function))
                return out, lse.masked_fill(lse == -INF, 0.0)  # no gradient is to come from there

            return call

        def options_of(function):
            cpu = function is family.flash_attn_func_reference
            return {n: o.cpu() if cpu and isinstance(o, torch.Tensor) else o for n, o in options.items()}

        slack = CANCELS if q.dtype == torch.float32 else 0.0
        results = check(
            run(family.flash_attn_func), run(family.flash_attn_func_reference), q, k, v, s_aux, dim=None, grads=grads,
            ulps=ULPS[q.dtype], slack=slack,
        )  # fmt: skip
        assert results[0].is_contiguous() and results[0].dtype == q.dtype
        return results

    return hold


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("Sq, Sk", [(5, 5), (5, 6), (6, 5), (1, 4), (4, 1)])
def test_seen_is_what_the_words_say(family, Sq, Sk):
    for left, right, offset in itertools.product((-1, 0, 1, 3), (-1, 0, 1, 3), (0, Sk - Sq)):
        seen = family._seen(Sq, Sk, offset, left, right, "cpu")
        for i, j in itertools.product(range(Sq), range(Sk)):
            expected = True
            if left >= 0 and j < i + offset - left:
                expected = False
            if right >= 0 and j > i + offset + right:
                expected = False
            assert seen[i, j] == expected


def test_reference_is_torch(family):
    q, k, v = (tensor((2, 3, s, 8), torch.float64) for s in (5, 7, 7))
    mask = torch.rand(2, 1, 5, 7) > 0.4
    mask[..., 0] = True
    for m, causal in ((None, False), (None, True), (mask, False), (tensor((5, 7), torch.float64), False)):
        options = {"attn_mask": m, "is_causal": causal, "scale": 0.3}
        mine, theirs = (
            evaluate(function, (q, k, v), options, [torch.ones_like(q)])
            for function in (family.scaled_dot_product_attention_reference, F.scaled_dot_product_attention)
        )
        for a, b in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1])):
            assert_close(a, b, dim=None)


def test_reference_options(family):
    """Soft cap, alibi and sinks, written out for one query."""
    q, k, v = qkv(1, 3, 4, 2, 1, 5, torch.float64)
    slopes, sinks = torch.tensor([0.5, 0.1]).double(), torch.tensor([0.3, -1.0]).double()
    out, lse, _ = family.flash_attn_func_reference(
        q, k, v, softmax_scale=0.4, causal=True, softcap=2.0, alibi_slopes=slopes, s_aux=sinks, return_attn_probs=True
    )
    for i, h in itertools.product(range(3), range(2)):
        s = [
            2.0 * math.tanh(0.4 * float(q[0, i, h] @ k[0, j, 0]) / 2.0) - float(slopes[h]) * abs(i + 1 - j)
            for j in range(i + 2)
        ]
        total = sum(map(math.exp, s)) + math.exp(sinks[h])
        assert abs(math.log(total) - lse[0, h, i]) < 1e-12
        expected = sum(math.exp(x) / total * v[0, j, 0] for j, x in enumerate(s))
        assert_close(out[0, i, h], expected)


# Then what is public.


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(hold, device, dtype):
    q, k, v = qkv(1, 70, 90, 4, 2, 32, dtype, device)
    for options in ({}, {"causal": True}, {"causal": True, "softcap": 2.0}, {"window_size": (20, 9)}):
        hold(q, k, v, **options)
    hold(q, k, v, s_aux=tensor((4,), dtype, device), causal=True)
    hold(q, k, v, alibi_slopes=torch.rand(1, 4, device=device), softmax_scale=-0.2)


@pytest.mark.parametrize("Sq, Sk", few([(5, 6), (5, 5), (7, 1), (1, 7), (40, 33), (6, 5)]))
def test_all_flag_pairs(family, device, Sq, Sk):
    """Forward and gradients against the mask that a loop makes."""
    tensors = qkv(1, Sq, Sk, 2, 1, 16, device=device)
    wide = [t.cpu().double() for t in tensors]
    dout = torch.randn(1, Sq, 2, 16)
    widths = (-1, 0, 2) if Sq < 40 else (-1, 3)
    for left, right, causal in itertools.product(widths, widths, (False, True)):
        seen = torch.zeros(Sq, Sk, dtype=torch.bool)
        for i, j in itertools.product(range(Sq), range(Sk)):
            distance = j - (i + Sk - Sq)
            seen[i, j] = (left < 0 or distance >= -left) and (
                distance <= 0 if causal else right < 0 or distance <= right
            )

        def ours(q, k, v, window=(left, right), causal=causal):
            return family.flash_attn_func(q, k, v, causal=causal, window_size=window)

        def brute(q, k, v, seen=seen):
            s = (torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) / 4.0).masked_fill(~seen, -INF)
            p = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=-1e30)).masked_fill(~seen, 0.0)
            return torch.einsum("bhij,bjd->bihd", p / p.sum(-1, keepdim=True).clamp(min=1e-300), v[:, :, 0])

        found = evaluate(ours, tensors, {}, [dout.to(device)])
        expected = evaluate(brute, wide, {}, [dout.double()])
        for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1])):
            assert_close(
                a, b, dim=None, ulps=32, slack=2e-6, name=f"{left, right, causal}"
            )  # a row of one key: 0 as a difference


def test_torchs_causal_is_aligned_top_left(family, device):
    for Sq, Sk in ((3, 5), (5, 3), (40, 70), (70, 40)):
        q, k, v = (tensor((2, 2, s, 16), device=device) for s in (Sq, Sk, Sk))
        check(
            lambda q, k, v: family.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            q, k, v, dim=None, ulps=32, slack=CANCELS,
        )  # fmt: skip


@pytest.mark.parametrize("D", [1, 3, 16, 24, 72, 80, 96, 112, 128, 192, 256])
def test_head_dims(hold, device, D):
    hold(*qkv(1, 19, 35, 2, 1, D, torch.bfloat16 if D % 16 else torch.float16, device), causal=True)
    if D in (24, 128):
        hold(*qkv(1, 19, 35, 2, 1, D, torch.float32, device, DV=40))


def test_wide_heads_and_float64_go_through_pytorch(hold, device):
    hold(*qkv(1, 9, 8, 2, 1, 300, torch.float32, device), causal=True)


@pytest.mark.parametrize("Sq, Sk", [(0, 5), (5, 0), (1, 1), (0, 0), (128, 129), (129, 63), (17, 300)])
def test_lengths(hold, device, Sq, Sk):
    hold(*qkv(2, Sq, Sk, 2, 2, 16, torch.float32, device))
    hold(*qkv(1, Sq, Sk, 2, 1, 16, torch.float32, device), s_aux=torch.randn(2, device=device), window_size=(50, 30))


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (2, 4, 4, 0)])
def test_empty(hold, device, shape):
    B, Sq, Sk, H = shape
    hold(*qkv(B, Sq, Sk, H, H, 16, torch.float32, device))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(hold, device, layout):
    q, k, v = qkv(2, 33, 34, 4, 2, 16, torch.float32, device, layout=layout)
    hold(q, k, v, causal=True, grads=[tensor((2, 33, 4, 16), device=device, layout=layout),
                                      tensor((2, 4, 33), device=device, layout=layout)])  # fmt: skip


def test_slices_of_one_projection(hold, device):
    q, k, v = torch.randn(2, 20, 3, 2, 16, device=device, dtype=torch.bfloat16).unbind(2)
    hold(q, k, v, causal=True)
    hold(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_last_key_that_all_of_a_tile_see(hold, device, dtype):
    """A key before, and one after, where blocks of 16 to 128 keys begin."""
    q, k, v = qkv(1, 3, 129, 1, 1, 16, dtype, device)
    hold(q, k, v, causal=True)  # the first query sees keys up to 126
    q, k, v = qkv(1, 3, 130, 1, 1, 16, dtype, device)
    hold(q, k, v, window_size=(64, 2))  # the last query sees keys from 65


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_strides_of_numbers_per_head(family, hold, device, layout):
    """Sinks, slopes and starts are read where they lie, too."""
    q, k, v = qkv(2, 5, 7, 4, 2, 16, device=device)

    def lie(*values):
        t = torch.tensor(values, device=device)
        return t.repeat_interleave(2, 0)[::2] if layout == "strided" else t[:1].expand(t.shape)

    sinks, slopes = lie(0.5, -1.0, 2.0, 1.0), lie([0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8])
    hold(q, k, v, sinks, alibi_slopes=slopes)
    hold(q, k, v, sinks, alibi_slopes=slopes[0])
    starts = torch.tensor([0, 9, 3, 9, 5], dtype=torch.int32, device=device)[::2]
    args = (q[0], k[0], v[0], starts, starts, 5, 7)
    out = family.flash_attn_varlen_func(*args, alibi_slopes=slopes, s_aux=sinks)
    cpu = [t.cpu().double() if torch.is_tensor(t) and t.is_floating_point() else t for t in args]
    oracle = family.flash_attn_varlen_func_reference(
        *cpu, alibi_slopes=slopes.cpu().double(), s_aux=sinks.cpu().double()
    )
    assert_close(out, oracle, dim=None)


def test_rows_that_see_no_key(family, device):
    """0, -inf (or the sink), and no gradient: before the first key, after an empty window, under a mask."""
    q, k, v = qkv(1, 40, 20, 2, 2, 16, device=device)
    (out, lse, *_), grads = evaluate(
        lambda q, k, v: family.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2], (q, k, v), {},
        [torch.randn_like(q), torch.zeros(1, 2, 40, device=device)],
    )  # fmt: skip
    assert not out[:, :20].any() and (lse[..., :20] == -INF).all() and lse[..., 20:].isfinite().all()
    assert not grads[0][:, :20].any() and all(g.isfinite().all() for g in grads)
    sinks = torch.tensor([0.5, -INF], device=device)
    out, lse, _ = family.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)
    assert not out[:, :20].any() and (lse[0, 0, :20] - 0.5).abs().max() < 1e-6 and (lse[0, 1, :20] == -INF).all()
    mask = torch.ones(40, 20, dtype=torch.bool, device=device)
    mask[3] = False
    for m in (mask, torch.zeros(40, 20, device=device).masked_fill(~mask, -INF)):
        q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
        out = family.scaled_dot_product_attention(q, k, v, m)
        assert not out[:, :, 3].any() and out[:, :, 4].all()
        q.grad = None
        out.sum().backward()
        assert not q.grad[:, :, 3].any() and q.grad.isfinite().all() and k.grad.isfinite().all()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))


def test_special_values(family, device):
    """NaN and inf show in the rows that see them, and in no others."""
    q, k, v = qkv(1, 70, 70, 2, 1, 16, device=device)
    clean = family.flash_attn_func(q, k, v, causal=True)
    for which, place, value in ((0, 5, NAN), (1, 40, NAN), (2, 40, NAN), (0, 5, INF), (2, 40, INF)):
        tensors = [t.clone() for t in (q, k, v)]
        tensors[which][0, place, 0, 3] = value
        out = family.flash_attn_func(*tensors, causal=True)
        seen = torch.zeros(70, dtype=torch.bool, device=device)
        seen[place : place + 1 if which == 0 else None] = True
        heads = slice(0, 1 if which == 0 else 2)
        assert torch.equal(out[0, ~seen], clean[0, ~seen]) or which == 2  # 0 * NaN is NaN, as in torch
        bad = ~out[0, seen, heads].isfinite()
        assert bad[..., 3].all() if which == 2 else bad.all()
    large = family.flash_attn_func(q * 100, k * 100, v)  # far beyond what exp can hold
    assert_close(large, family.flash_attn_func_reference(*(t.double() for t in (q * 100, k * 100, v))), slack=1e-3)


@pytest.mark.parametrize("shape", few([(1, 50), (37, 50), (37, 1), (2, 1, 1, 50), (2, 4, 37, 50), (50,), (4, 1, 1)]))
def test_masks(family, device, shape):
    q, k, v = (tensor((2, h, s, 16), device=device) for h, s in ((4, 37), (2, 50), (2, 50)))
    boolean, added = torch.rand(shape, device=device) > 0.4, tensor(shape, device=device, scale=2.0)

    def run(function, mask):
        return lambda q, k, v, m=mask: function(q, k, v, m, enable_gqa=True)

    ours, reference = family.scaled_dot_product_attention, family.scaled_dot_product_attention_reference
    check(run(ours, boolean), run(reference, boolean.cpu()), q, k, v, dim=None, ulps=32, slack=CANCELS)
    # The mask's own gradient is a sum of differences, of results as they were rounded: hence what is added.
    check(ours, reference, q, k, v, added, dim=None, ulps=64, slack=1e-5, enable_gqa=True)
    if len(shape) == 2:
        half = [t.bfloat16() for t in (q, k, v)]
        check(ours, reference, *half, added, dim=None, ulps=8, slack=0.1, enable_gqa=True)


def test_masks_of_keys_are_lines(internals, device):
    """What hides the same keys from all queries is read as a line of a tile, however it came to (B, H, Sq, Sk)."""
    strides = internals("_attention_fwd").mask_strides
    assert strides(torch.zeros(2, 1, 1, 50, device=device).expand(2, 4, 37, 50)) == (50, 0, 1)
    assert strides(torch.zeros(37, 1, device=device).expand(2, 4, 37, 50)) == (0, 0, 1, 0)
    assert strides(torch.zeros(2, 4, 37, 50, device=device)) == (7400, 1850, 50, 1)


def test_lowest_number_as_mask(family, device):
    """As transformers masks padding: a row in which all is masked so is uniform, as it is in torch."""
    q, k, v = (tensor((1, 2, 8, 16), device=device) for _ in range(3))
    mask = torch.zeros(8, 8, device=device)
    mask[2], mask[:, 5:] = torch.finfo(mask.dtype).min, torch.finfo(mask.dtype).min
    assert_close(
        family.scaled_dot_product_attention(q, k, v, mask),
        F.scaled_dot_product_attention(*(t.cpu().double() for t in (q, k, v, mask))),
    )


@pytest.mark.parametrize("shape", [(3, 20, 16), (2, 3, 4, 20, 16)])
def test_other_ranks(family, device, shape):
    q, k, v = (tensor(shape, device=device) for _ in range(3))
    mask = torch.rand(20, 20, device=device) > 0.3
    for m, causal in ((None, True), (mask, False)):
        functions = family.scaled_dot_product_attention, F.scaled_dot_product_attention
        check(*functions, q, k, v, dim=None, ulps=32, slack=CANCELS, attn_mask=m, is_causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", few([{"causal": True}, {}, {"softcap": 2.0, "s_aux": True}, {"window_size": (4, 2)}])
)
def test_packed(family, device, dtype, options):
    """Sequences of unequal lengths, one of them empty, and rows of none of them that hold NaN."""
    q, k, v = (tensor((s, h, 16), dtype, device) for s, h in ((75, 4), (85, 2), (85, 2)))
    starts_q, starts_k = ([0, 5, 5, 70], [0, 9, 20, 60])
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in (starts_q, starts_k))
    k[60:], v[60:] = NAN, NAN
    options = dict(options)
    sinks = [torch.randn(4, device=device)] if options.pop("s_aux", False) else []
    dout = torch.randn_like(q)

    def packed(q, k, v, *sinks):
        s = sinks[0] if sinks else None
        return family.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 65, 40, s_aux=s, return_attn_probs=True, **options)[
            :2
        ]

    def one_by_one(q, k, v, *sinks):
        return family.flash_attn_varlen_func_reference(
            q, k, v, cu_q.cpu(), cu_k.cpu(), 65, 40, s_aux=sinks[0] if sinks else None, **options
        )

    with torch.no_grad():
        out, lse = packed(q, k, v, *sinks)
    assert not out[70:].any() and (lse[:, 70:] == -INF).all()
    (_, _), found = evaluate(packed, (q, k, v, *sinks), {}, [dout, torch.zeros_like(lse)])
    wide = [t.cpu().double() for t in (q, k[:60], v[:60], *sinks)]
    (expected,), grads = evaluate(one_by_one, wide, {}, [dout[:70].cpu().double()])
    assert_close(out[:70], expected, dim=None, ulps=ULPS[dtype])
    for n, (a, b) in enumerate(zip(found, grads)):
        if n in (1, 2):
            assert not a[60:].any()
            a = a[:60]
        assert_close(a, b, dim=None, ulps=ULPS[dtype], name=str(n), slack=2e-2 if n == 3 and dtype.itemsize == 2 else 0)
    longest = torch.tensor(65, device=device), torch.tensor(40, device=device)
    again = family.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, s_aux=sinks[0] if sinks else None, **options)
    assert torch.equal(again, out)


def test_pages(family, device):
    """Keys in pages, in any order, are keys."""
    q = tensor((12, 4, 16), torch.float32, device)
    k, v = (tensor((9, 8, 2, 16), torch.float32, device) for _ in range(2))
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 5, 12], [0, 30, 47]))
    table = torch.tensor([[7, 0, 3, 5], [2, 8, 1, 0]], dtype=torch.int32, device=device)
    for options in ({}, {"causal": True, "window_size": (20, 0)}):
        out = family.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 30, block_table=table, **options)
        expected = family.flash_attn_varlen_func_reference(
            *(t.cpu().double() for t in (q, k, v)), cu_q.cpu(), cu_k.cpu(), 7, 30, block_table=table.cpu(), **options
        )
        assert_close(out, expected)
    with pytest.raises(NotImplementedError, match="block_table must come without gradients"):
        family.flash_attn_varlen_func(q.requires_grad_(), k, v, cu_q, cu_k, 7, 30, block_table=table)


def test_dropout(hold, fixed_seed, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        hold(*qkv(2, 50, 45, 4, 2, 16, dtype, device), dropout_p=0.4, causal=True)
    out, _ = hold(*qkv(1, 5, 5, 1, 1, 16, torch.float32, device), dropout_p=1.0)
    assert not out.any()


def test_dropout_mask(family, device):
    """Drops a share of p, another in each call, the same after torch.manual_seed."""
    q = torch.zeros(2, 64, 2, 16, device=device)
    v = torch.eye(64, device=device)[None, :, None].expand(2, 64, 2, 64)
    first, second = (family.flash_attn_func(q, q, v, dropout_p=0.3) for _ in range(2))
    assert abs(float((first != 0).float().mean()) - 0.7) < 0.02 and not torch.equal(first, second)
    rows = (first != 0).flatten(0, 2)
    assert len({tuple(r.tolist()) for r in rows}) == len(rows)
    torch.manual_seed(3)
    again = [family.flash_attn_func(q, q, v, dropout_p=0.3)]
    torch.manual_seed(3)
    again += [family.flash_attn_func(q, q, v, dropout_p=0.3)]
    assert torch.equal(*again)


def test_deterministic(family, device):
    q, k, v = qkv(2, 100, 90, 4, 1, 32, torch.bfloat16, device)

    def once():
        return evaluate(lambda q, k, v: family.flash_attn_func(q, k, v, causal=True), (q, k, v), {}, [q])

    (out,), grads = once()
    for _ in range(3 if device.type == "cpu" else 20):
        (o,), g = once()
        assert torch.equal(o, out) and all(torch.equal(a, b) for a, b in zip(g, grads))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options", few([{"softcap": 2.0, "causal": True}, {}, {"window_size": (9, 4)}, {"causal": True}])
)
def test_descriptors(family, internals, device, monkeypatch, on_kernels, packed, options):
    """The kernels that read tiles by descriptors compute what those with pointers do, here in the interpreter."""
    if not on_kernels or device.type != "cpu":
        pytest.skip("on a GPU that has them, descriptors are used all along")
    fwd, bwd = internals("_attention_fwd"), internals("_attention_bwd")
    monkeypatch.setattr(internals("_replay"), "_compiling", lambda: True)  # plans are to be asked for each time
    q, k, v = (t.to(torch.bfloat16) for t in qkv(2, 70, 60, 4, 2, 24))
    if packed:
        cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 5, 5, 70], [0, 9, 20, 55]))
        q, k, v = q[0], k[0].clone(), v[0].clone()
        k[20:], v[20:] = NAN, NAN  # of the last sequence, which must not show in the others

    def call(q, k, v):
        if packed:
            return family.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 65, 40, **options)
        return family.flash_attn_func(q, k, v, **options)

    with_pointers = evaluate(call, (q, k, v), {}, [torch.ones_like(q)])
    plan = fwd.Plan("descriptor", 32, 32, 2, 4)
    monkeypatch.setattr(fwd, "plan_forward", lambda *args, **more: plan)
    monkeypatch.setattr(bwd, "plan_backward", lambda *args, **more: (plan, plan))
    facts = fwd.facts(device)._replace(descriptors=True)
    monkeypatch.setattr(fwd, "facts", lambda d: facts)
    monkeypatch.setattr(bwd, "facts", lambda d: facts)
    found = evaluate(call, (q, k, v), {}, [torch.ones_like(q)])
    for a, b in zip((*found[0], *found[1]), (*with_pointers[0], *with_pointers[1])):
        # of other tile sizes
        assert_close(a, b.double(), dim=None, ulps=4)
    assert not packed or not found[0][0][:5].isnan().any()


def test_long_sums_in_float32(kernel, device):
    """Of tiles, added up: one chain over 8192 keys is 13.7 ulps off on an H200, and this 4.1."""
    # Of more queries than the kernel that splits keys takes.
    q, k, v = (tensor((1, rows, 1, 64), torch.float32, device) for rows in (80, 8192, 8192))
    found = kernel.flash_attn_func(q, k, v).cpu().double()
    exact = F.scaled_dot_product_attention(*(t.cpu().double().transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    assert (found - exact).norm() <= 8 * torch.finfo(torch.float32).eps * exact.norm()


def test_plans_fit(internals):
    """Whatever the device, dtype and head dim: operands fit into shared memory, and tiles suit short sequences."""
    fwd, bwd, Device = internals("_attention_fwd"), internals("_attention_bwd"), internals("_device").Device
    devices = [Device(8, 16, 65536), Device(108, 32, 166912), Device(132, 32, 232448, "", "sm90", True)]
    for device, itemsize, D, extras in itertools.product(devices, (2, 4), (16, 64, 128, 256), ("", "more", "mask")):
        plan = fwd.plan_forward(4096, D, itemsize, True, device, extras=extras)
        assert (plan.BLOCK_M + plan.BLOCK_N) * D * itemsize <= device.shared_memory
        for p in bwd.plan_backward(4096, 4096, D, itemsize, extras, True, device) or ():
            assert (p.BLOCK_M + p.BLOCK_N) * D * itemsize <= device.shared_memory
        assert fwd.plan_forward(1, D, itemsize, False, device, extras=extras).BLOCK_M == 16
        assert all(p.num_warps <= device.max_warps for p in (plan, p))


def test_autocast(family, device):
    q, k, v = qkv(1, 9, 9, 2, 1, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = family.flash_attn_func(q, k.half(), v, causal=True)
        other = family.scaled_dot_product_attention(*(t.transpose(1, 2).expand(1, 2, 9, 16) for t in (q, k, v)))
    assert out.dtype == other.dtype == torch.bfloat16
    assert torch.equal(out, family.flash_attn_func(q.bfloat16(), k.half().bfloat16(), v.bfloat16(), causal=True))


def test_bad_input(family, device):
    q, k, v = qkv(2, 4, 4, 4, 2, 16, device=device)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    flash, packed, torchs = family.flash_attn_func, family.flash_attn_varlen_func, family.scaled_dot_product_attention
    cases = [
        (TypeError, "flash_attn_func: k must have dtype float32 as q, got float16", lambda: flash(q, k.half(), v)),
        (TypeError, "flash_attn_func: q must be a tensor, got list", lambda: flash([1.0], k, v)),
        (TypeError, "flash_attn_func: v must be a tensor, got NoneType", lambda: flash(q, k, None)),
        (TypeError, "scaled_dot_product_attention: key must be a tensor, got NoneType", lambda: torchs(q, None, q)),
        (ValueError, "flash_attn_func: q must have 4 dimensions, got shape (4, 4, 16)", lambda: flash(q[0], k, v)),
        (ValueError, "flash_attn_func: q's heads must be a multiple of the 2 of k, got 3",
         lambda: flash(q[:, :, :3], k, v)),
        (ValueError, "flash_attn_func: k must have head dimension 16, got 8", lambda: flash(q, k[..., :8], v)),
        (ValueError, "flash_attn_func: k and v must have shapes (B, Sk, Hk, D)", lambda: flash(q, k, v[:, :3])),
        (ValueError, "flash_attn_func: dropout_p must be in [0, 1], got 1.5", lambda: flash(q, k, v, 1.5)),
        (ValueError, "flash_attn_func: window_size must be two integers", lambda: flash(q, k, v, window_size=3)),
        (ValueError, "flash_attn_func: softcap must be at least 0, got -1", lambda: flash(q, k, v, softcap=-1)),
        (ValueError, "flash_attn_func: s_aux must have shape (4,), got (2,)",
         lambda: flash(q, k, v, s_aux=q[0, 0, :2, 0])),
        (ValueError, "flash_attn_func: alibi_slopes must have shape (4,) or (2, 4), got (3,)",
         lambda: flash(q, k, v, alibi_slopes=q[0, 0, :3, 0])),
        # Rows that are not there would be read.
        (ValueError, "flash_attn_func: alibi_slopes must have shape (4,) or (2, 4), got (1, 4)",
         lambda: flash(q, k, v, alibi_slopes=q[:1, 0, :, 0])),
        (ValueError, "flash_attn_varlen_func: alibi_slopes must have shape (4,) or (1, 4), got (2, 4)",
         lambda: packed(q[0], k[0], v[0], cu, cu, 4, 4, alibi_slopes=q[:, 0, :, 0])),
        (ValueError, "flash_attn_varlen_func: cu_seqlens_k must have shape (2,), got (1,)",
         lambda: packed(q[0], k[0], v[0], cu, cu[:1], 4, 4)),
        (ValueError, "flash_attn_varlen_func: block_table must have shape (1, 3), got (2, 3)",
         lambda: packed(q[0], k, v, cu, cu, 4, 4, block_table=torch.zeros(2, 3, dtype=torch.int32, device=device))),
        (ValueError, "flash_attn_varlen_func: max_seqlen_k must be at least 0, got -1",
         lambda: packed(q[0], k[0], v[0], cu, cu, 4, -1)),
        (TypeError, "flash_attn_func: causal must be True or False, got 'no'", lambda: flash(q, k, v, causal="no")),
        (TypeError, "scaled_dot_product_attention: enable_gqa must be True or False, got 1",
         lambda: torchs(q, q, q, enable_gqa=1)),
        (TypeError, "flash_attn_varlen_func: cu_seqlens_k must be a tensor of dtype int32 | int64, got float32",
         lambda: packed(q[0], k[0], v[0], cu, cu.float(), 4, 4)),
        (TypeError, "flash_attn_varlen_func: max_seqlen_q must be an int or a tensor, got float",
         lambda: packed(q[0], k[0], v[0], cu, cu, 4.0, 4)),
        (ValueError, "scaled_dot_product_attention: key must have query's 4 heads without enable_gqa, got 2",
         lambda: torchs(*(t.transpose(1, 2) for t in (q, k, v)))),
        (ValueError, "scaled_dot_product_attention: attn_mask must broadcast to (2, 4, 4, 4), got (3, 4)",
         lambda: torchs(q, q, q, torch.ones(3, 4, dtype=torch.bool, device=device))),
        (ValueError, "scaled_dot_product_attention: attn_mask must be None with is_causal, got a tensor",
         lambda: torchs(q, q, q, torch.ones(4, 4, dtype=torch.bool, device=device), is_causal=True)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message), str(caught.value)
    with pytest.raises(NotImplementedError, match="alibi_slopes must not require grad"):
        flash(q, k, v, alibi_slopes=torch.rand(4, device=device).requires_grad_())


OPTIONS = (4, 5, 0.3, -1, -1, False, 0.0, 0.0)  # of a registered op, after its tensors


def test_opcheck(family, device):
    q, k, v = (t.requires_grad_() for t in qkv(2, 4, 5, 2, 1, 16, device=device))
    mask, sinks = tensor((2, 2, 4, 5), device=device).requires_grad_(), torch.randn(2, device=device).requires_grad_()
    seed = torch.tensor(3, device=device)
    none = (None,) * 7
    opcheck(family.attention_fwd, (q, k, v, *none, *OPTIONS))
    opcheck(
        family.attention_fwd, (q, k, v, None, None, None, mask, None, sinks, seed, *OPTIONS[:3], 2, 0, True, 2.0, 0.3)
    )
    q, k, v = (t.detach().transpose(0, 2) for t in (q, k, v))
    k, v = k.transpose(0, 1).reshape(5, 1, 2, 16)[:, :, 0], v.transpose(0, 1).reshape(5, 1, 2, 16)[:, :, 0]
    q = q.reshape(4, 2, 2, 16)[:, :, 0].requires_grad_()
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 1, 4], [0, 3, 5]))
    opcheck(family.attention_fwd, (q, k, v, cu_q, cu_k, *none[2:], *OPTIONS))
    q = q.detach()
    out, lse = family.attention_fwd(q, k, v, cu_q, cu_k, *none[2:], *OPTIONS)
    bwd = (q, k, v, out, None, out, lse, cu_q, cu_k, None, None, None, None, *OPTIONS, False, False)
    opcheck(family.attention_bwd, bwd)


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    q, k, v = (t.requires_grad_() for t in qkv(2, 40, 50, 2, 1, 16, torch.bfloat16, device))
    direct = family._attention(q, k, v, *(None,) * 7, 40, 50, 0.3, -1, 0, False, 0.0, 0.0)
    op = family.attention_fwd(q, k, v, *(None,) * 7, 40, 50, 0.3, -1, 0, False, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(direct, op))
    grads = (torch.autograd.grad(r[0], (q, k, v), torch.ones_like(q)) for r in (direct, op))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_compile(family, device):
    def step(q, k, v, mask, cu):
        a = family.flash_attn_func(q, k, v, causal=True, softcap=3.0)
        b = family.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask, enable_gqa=True)
        c = family.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6)
        return (a + b.transpose(1, 2) + c).square().sum((-1, -2))

    q, k, v = qkv(2, 10, 10, 2, 1, 16, device=device)
    mask, cu = torch.rand(10, 10, device=device) > 0.2, torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    compiled = torch.compile(step, fullgraph=True)
    plain, traced = (
        evaluate(lambda q, k, v, f=f: f(q, k, v, mask, cu), (q, k, v), {}, [torch.ones(2, 10, device=device)])
        for f in (step, compiled)
    )
    for a, b in zip((*plain[0], *plain[1]), (*traced[0], *traced[1])):
        assert_close(b, a.double(), dim=None)


def test_derivatives(family, device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 3, 4, 2, 1, 3, torch.float64, device))
    sinks = torch.randn(2, device=device, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda q, k, v, s: family.flash_attn_func(
            q, k, v, causal=True, softcap=1.5, s_aux=s, window_size=(2, 0), return_attn_probs=True
        )[:2],
        (q, k, v, sinks),
    )
    assert gradcheck(
        lambda q, m: family.scaled_dot_product_attention(q.transpose(1, 2), *kv, m, enable_gqa=True),
        (q, mask)) if (kv := [t.transpose(1, 2) for t in (k, v)]) else None  # fmt: skip


def test_second_derivative_is_refused(family, device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 3, 4, 2, 1, 16, device=device))
    out = family.flash_attn_func(q, k, v, softcap=1.0)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_func_reference"):
        dq.sum().backward()


def test_transforms(family, device):
    q, k, v = qkv(3, 4, 5, 2, 1, 16, device=device)

    def loss(function):
        return lambda q, k, v: function(q[None], k[None], v[None], causal=True, softcap=2.0).square().sum()

    mine, theirs = (
        torch.func.vmap(torch.func.grad(loss(f), (0, 1, 2)))(q, k, v)
        for f in (family.flash_attn_func, family.flash_attn_func_reference)
    )
    for a, b in zip(mine, theirs):
        assert_close(a, b.double(), dim=None, ulps=64)


def test_forward_mode_is_refused_not_lost(family, device):
    q, k, v = qkv(1, 3, 4, 2, 1, 16, device=device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda q: family.flash_attn_func(q, k, v, softcap=1.0), (q,), (q,))


def test_far_rows(family, device):
    if device.type == "cpu":
        pytest.skip("12 GiB of memory: on a GPU only")
    far = [torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=device).as_strided((2, 64, 1, 64), (2**31, 64, 64, 1))
           for _ in range(3)]  # fmt: skip
    for t in far:
        t.copy_(torch.randn(2, 64, 1, 64))
    near = [t.contiguous() for t in far]
    results = [evaluate(lambda q, k, v: family.flash_attn_func(q, k, v, causal=True), t, {}, [near[0]])
               for t in (far, near)]  # fmt: skip
    for a, b in zip((*results[0][0], *results[0][1]), (*results[1][0], *results[1][1])):
        assert torch.equal(a, b)


def test_far_keys(family, device, tmp_path):
    """Rows that lie 2^25 elements apart: those from the 64th on begin past 2^31."""
    room = 2**25
    space = vast(130 * room, device, tmp_path)
    far = [torch.as_strided(space, (1, 130, 1, 16), (0, room, 0, 1), 16 * n) for n in range(3)]
    near = [tensor((1, 130, 1, 16), torch.bfloat16, device) for _ in far]
    for t, n in zip(far, near):
        t.copy_(n)
    results = [evaluate(family.flash_attn_func, t, {}, [near[0]]) for t in (far, near)]
    for a, b in zip((*results[0][0], *results[0][1]), (*results[1][0], *results[1][1])):
        assert_close(a, b.double(), dim=None)  # by other kernels on some GPUs


def test_scores_past_32_bits(family, device):
    """float32 scores that differ by more than 2^31 in their last digit choose one key, as PyTorch's do."""
    q, k, v = (torch.randn(1, n, 2, 64, device=device) for n in (70, 130, 130))
    q, k = q * 1e15, k * 1e15
    scores = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)) / 8
    chosen = v.transpose(1, 2).gather(2, scores.argmax(-1)[..., None].expand(-1, -1, -1, 64)).transpose(1, 2)
    assert torch.equal(family.flash_attn_func(q, k, v), chosen)


def test_distances_are_whole_numbers(hold, device):
    """More than 2048 keys away, where float16 knows every other number alone."""
    q, k, v = qkv(1, 1, 4100, 1, 1, 16, device=device)
    hold(q, k, v, alibi_slopes=torch.full((1,), 2.0**-10, device=device))


def test_graph(family, device):
    """Captured with dropout: each replay draws another mask, and its backward the same."""
    if device.type != "cuda":
        pytest.skip("needs CUDA graphs")
    q, k, v = (t.requires_grad_() for t in qkv(1, 64, 64, 2, 1, 64, torch.bfloat16, device))
    eye = torch.eye(64, dtype=torch.bfloat16, device=device)[None, :, None]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step():
        out = family.flash_attn_func(q * 0, k, v * 0 + eye, dropout_p=0.5)
        (dv,) = torch.autograd.grad(out, v, torch.ones_like(out), allow_unused=True)
        return out, dv

    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append((out != 0).clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
