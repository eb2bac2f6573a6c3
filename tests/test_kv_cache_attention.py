import inspect

import pytest
import torch
import torch.nn.functional as F
from _inputs import tensor, vast
from _numerics import DTYPES, assert_close, opcheck

NAN, INF = float("nan"), float("inf")
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def family(internals):
    return internals("kv_cache_attention")


@pytest.fixture
def hold(family, device):
    """Hold the function, its log-sum-exp and the caches it writes to against the reference in float64."""

    def hold(q, k_cache, v_cache, k=None, v=None, cos=None, sin=None, **options):
        args = q, k_cache, v_cache, k, v, cos, sin
        wide = [t if t is None else t.cpu().double().clone() for t in args]
        kept = {i: t.clone() for i, t in enumerate(args) if t is not None and i not in (1, 2)}
        out, lse = family.flash_attn_with_kvcache(*args, return_softmax_lse=True, **options)
        assert all(torch.equal(args[i], t) for i, t in kept.items()), "the caller's tensor was written to"
        assert out.dtype == q.dtype and out.is_contiguous() and lse.is_contiguous()
        oracle_options = {
            name: o if not isinstance(o, torch.Tensor) else o.cpu().double() if o.is_floating_point() else o.cpu()
            for name, o in options.items()
        }
        expected, expected_lse = family.flash_attn_with_kvcache_reference(
            *wide, return_softmax_lse=True, **oracle_options
        )
        # The values that a mean is taken of are of order 1, and may cancel.
        assert_close(out, expected, slack=16 * torch.finfo(out.dtype).eps if out.dtype == torch.float32 else 0.0)
        assert_close(lse, expected_lse, slack=16 * torch.finfo(lse.dtype).eps)  # peak and log of the sum may cancel
        if k is not None and cos is None:
            assert torch.equal(k_cache.cpu().double(), wide[1]) and torch.equal(v_cache.cpu().double(), wide[2])
        return out, lse

    return hold


def lengths(device, *values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def make(B, S, H, heads, D, T, dtype=torch.float32, device="cpu"):
    return [tensor(s, dtype, device) for s in ((B, S, H, D), (B, T, heads, D), (B, T, heads, D))]


def pages_of(cache, size, spare=2):
    """The same cache in shuffled pages of `size`, and its table; the spare pages are NaN."""
    B, T, heads, D = cache.shape
    n = -(-T // size)
    padded = F.pad(cache, (0, 0, 0, 0, 0, n * size - T), value=NAN).reshape(B * n, size, heads, D)
    pages = torch.full((B * n + spare, size, heads, D), NAN, dtype=cache.dtype, device=cache.device)
    order = torch.randperm(B * n + spare, generator=torch.Generator().manual_seed(1))[: B * n].to(cache.device)
    pages[order] = padded
    return pages, order.view(B, n).int()


# The reference first: it is the oracle of everything below.


def brute(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, sinks=None):
    """One sequence: q (S, H, D) over the k and v (T, heads, D) that it has, key by key."""
    S, H, D = q.shape
    T, heads = k.shape[:2]
    out, lse = torch.zeros(S, H, D, dtype=q.dtype), torch.full((H, S), -INF, dtype=q.dtype)
    for i in range(S):
        for h in range(H):
            pos, g, scores, keys = T - S + i, h // (H // heads), [], []
            for j in range(T):
                if causal and j > pos:
                    continue
                if window[0] >= 0 and j < pos - window[0] or window[1] >= 0 and j > pos + window[1]:
                    continue
                s = (q[i, h] @ k[j, g]) * (D**-0.5 if scale is None else scale)
                s = softcap * torch.tanh(s / softcap) if softcap else s
                scores.append(s - (0 if slopes is None else slopes[h] * abs(pos - j)))
                keys.append(v[j, g])
            values = (
                torch.stack(scores + ([] if sinks is None else [sinks[h]])) if scores or sinks is not None else None
            )
            if values is not None:
                lse[h, i] = values.logsumexp(0)
            if keys:
                out[i, h] = values.softmax(0)[: len(keys)] @ torch.stack(keys)
    return out, lse


OPTIONS = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (0, 0)},
    {"window": (3, -1)},
    {"window": (-1, 1), "causal": True},
    {"window": (3, 3), "causal": True, "scale": 0.7},
    {"softcap": 2.0, "causal": True},
    {"slopes": True, "causal": True},
    {"slopes": True, "sinks": True, "window": (4, 2)},
    {"sinks": True, "softcap": 1.5},
]


def drawn(options, H, dtype=torch.float64, device="cpu"):
    """(options as flash_attn_with_kvcache takes them, as `brute` does)."""
    mine, theirs = {}, dict(options)
    for name, to in (
        ("window", "window_size"),
        ("scale", "softmax_scale"),
        ("causal", "causal"),
        ("softcap", "softcap"),
    ):
        if name in options:
            mine[to] = options[name]
    for name, to in (("slopes", "alibi_slopes"), ("sinks", "s_aux")):
        if name in options:
            theirs[name] = torch.rand(H, dtype=torch.float64).to(dtype).double()
            mine[to] = theirs[name].to(dtype).to(device)
    return mine, theirs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference_is_brute_force(family, options):
    q, k, v = make(3, 4, 4, 2, 5, 7, torch.float64)
    mine, theirs = drawn(options, 4)
    lens = (7, 2, 0)
    out, lse = family.flash_attn_with_kvcache_reference(
        q, k, v, cache_seqlens=lengths("cpu", *lens), return_softmax_lse=True, **mine
    )
    for b, n in enumerate(lens):
        expected, expected_lse = brute(q[b], k[b, :n], v[b, :n], **theirs)
        assert_close(out[b], expected)
        assert_close(lse[b], expected_lse)


def test_reference_is_torch(family):
    q, k, v = make(2, 5, 4, 2, 8, 5, torch.float64)
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
        assert_close(family.flash_attn_with_kvcache_reference(q, k, v, causal=causal), expected)


# The function.


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(hold, device, dtype):
    q, k, v = make(2, 1, 8, 2, 64, 150, dtype, device)
    hold(q, k, v, cache_seqlens=lengths(device, 150, 33))
    hold(q, k, v, cache_seqlens=lengths(device, 150, 33), num_splits=3)
    q, k, v = make(2, 3, 4, 4, 32, 40, dtype, device)
    kn, vn = (tensor((2, 3, 4, 32), dtype, device) for _ in range(2))
    hold(q, k, v, kn, vn, cache_seqlens=lengths(device, 37, 0, dtype=torch.int64), causal=True)
    hold(q, k, v, kn, vn, cache_seqlens=20, causal=True, num_splits=2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_options(hold, device, options, splits):
    """All that hides or moves a score, with lengths that end in the middle of a block, and rows that see nothing."""
    q, k, v = make(3, 5, 6, 2, 16, 90, torch.float32, device)
    mine, _ = drawn(options, 6, torch.float32, device)
    hold(q, k, v, cache_seqlens=lengths(device, 90, 3, 0), num_splits=splits, **mine)


@pytest.mark.parametrize("D", [1, 16, 40, 72, 80, 96, 112, 192, 256])
def test_head_dims(hold, device, D):
    q, k, v = make(1, 1, 4, 2, D, 70, torch.float32, device)
    hold(q, k, v)


@pytest.mark.parametrize("S, H, heads", [(1, 1, 1), (1, 12, 1), (2, 7, 7), (9, 8, 2), (70, 2, 1), (1, 40, 1)])
def test_groups(hold, device, S, H, heads):
    """Rows of a tile are tokens by heads: less than one tile, one, and several."""
    q, k, v = make(2, S, H, heads, 16, 80, torch.float32, device)
    hold(q, k, v, cache_seqlens=lengths(device, 80, 61), causal=True, num_splits=2)


@pytest.mark.parametrize("size", [1, 16, 24])
def test_pages(hold, family, device, size):
    q, k, v = make(2, 2, 4, 2, 32, 60, torch.float32, device)
    lens = lengths(device, 60, 17)
    expected = family.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
    (pk, table), (pv, _) = pages_of(k, size), pages_of(v, size)
    out = family.flash_attn_with_kvcache(q, pk, pv, cache_seqlens=lens, causal=True, block_table=table)
    assert_close(out, expected.double())
    table[1, -(-17 // size) :] = -1  # what is not reached may hold anything
    hold(q, pk, pv, cache_seqlens=lens, causal=True, block_table=table.long())
    hold(q, pk, pv, cache_seqlens=lens, block_table=table, num_splits=3)


@pytest.mark.parametrize("paged", [False, True])
def test_append(family, device, paged):
    """Into their places and nowhere else; what has no place is dropped."""
    q, k, v = make(5, 3, 2, 2, 16, 20, torch.float32, device)
    kn, vn = (tensor((5, 3, 2, 16), torch.float32, device) for _ in range(2))
    lens = lengths(device, 0, 7, 18, -1, 25)
    expected = [k.clone(), v.clone()]
    for cache, fresh in zip(expected, (kn, vn)):
        cache[0, 0:3], cache[1, 7:10], cache[2, 18:20], cache[3, 0:2] = fresh[0], fresh[1], fresh[2, :2], fresh[3, 1:]
    options = {}
    if paged:
        (k, table), (v, _) = pages_of(k, 4), pages_of(v, 4)
        table[0, 1:] = -1
        options["block_table"] = table
    before, versions = [k.clone(), v.clone()], [k._version, v._version]
    out = family.flash_attn_with_kvcache(q, k, v, kn, vn, cache_seqlens=lens, causal=True, **options)
    assert [k._version, v._version] > versions
    if paged:
        full = family.flash_attn_with_kvcache(q, *(expected), cache_seqlens=(lens + 3).clamp(0, 20), causal=True)
        for cache, old, e in zip((k, v), before, expected):
            changed = (cache != old) & ~(cache.isnan() & old.isnan())
            for b in range(1, 5):
                assert torch.equal(cache[table[b].long()].flatten(0, 1), e[b])
            assert torch.equal(cache[table[0, 0].long(), :3], e[0, :3])
            assert int(changed.any(-1).any(-1).sum()) == 3 + 3 + 2 + 2
        assert torch.equal(out, full)
    else:
        assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])
        full = family.flash_attn_with_kvcache(q, k, v, cache_seqlens=(lens + 3).clamp(0, 20), causal=True)
        assert torch.equal(out, full)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", (torch.float64, *HALF))
def test_rotary(kernel, family, hold, device, dtype, interleaved):
    """As rotating before the call, by the position in the cache."""
    q, k, v = make(2, 3, 4, 2, 32, 40, dtype, device)
    kn, vn = (tensor((2, 3, 2, 32), dtype, device) for _ in range(2))
    lens = lengths(device, 5, 30)
    cos, sin = (tensor((64, 12), dtype, device) for _ in range(2))

    def turn(x, offsets, one=False):
        x = x.flatten(1, 2)[:, None] if one else x  # all tokens at one position: as heads of one token
        y = kernel.rotary(x, cos, sin, heads_dim=2, interleaved=interleaved, rotary_dim=24, offsets=offsets)
        return y.view(2, 3, 4, 32) if one else y

    for ordered in ({"causal": True}, {"window_size": (9, -1)}, {}):
        fresh = [t.clone() for t in (k, v)]
        out = family.flash_attn_with_kvcache(
            q, *fresh, kn, vn, cos, sin, cache_seqlens=lens, rotary_interleaved=interleaved, **ordered
        )
        ready = [t.clone() for t in (k, v)]
        expected, _ = hold(turn(q, lens, not ordered), *ready, turn(kn, lens), vn, cache_seqlens=lens, **ordered)
        for cache, known in zip(fresh, ready):
            assert_close(cache, known.double(), ulps=1 if dtype in HALF else None)
        assert_close(out, expected.double(), ulps=4)  # where the rotation was rounded otherwise


@pytest.mark.parametrize("B, S", [(1, 66), (66, 1)])
def test_append_of_far_rows(kernel, device, tmp_path, B, S):
    """New keys 2^25 elements apart: those from the 64th on begin past 2^31."""
    room, (q, k_cache, v_cache) = 2**25, make(B, S, 2, 1, 16, S + 2, torch.bfloat16, device)
    space = vast(66 * room, device, tmp_path)
    k, v = (torch.as_strided(space, (B, S, 1, 16), (room, room, 0, 1), n).copy_(k_cache[:, :S] * n) for n in (16, 32))
    kernel.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=2)
    assert torch.equal(k_cache[:, 2:], k) and torch.equal(v_cache[:, 2:], v)


def test_position_that_the_table_lacks(family, device):
    q, k, v = make(2, 1, 2, 2, 16, 20, torch.float32, device)
    kn, cos = tensor((2, 1, 2, 16), torch.float32, device), tensor((8, 4), torch.float32, device)
    out = family.flash_attn_with_kvcache(q, k, v, kn, kn, cos, cos, cache_seqlens=lengths(device, 7, 8))
    assert out[0].isfinite().all() and out[1].isnan().all()
    assert k[0].isfinite().all() and k[1, 8, :, :8].isnan().all() and k[1, 8, :, 8:].isfinite().all()


def test_rows_of_the_cache(hold, device):
    q, k, v = make(3, 2, 4, 2, 16, 40, torch.float32, device)
    k, v = (torch.cat((t, t.flip(1)), 0) for t in (k, v))
    kn, vn = (tensor((3, 2, 2, 16), torch.float32, device) for _ in range(2))
    index = lengths(device, 4, 0, 3)
    hold(q, k, v, kn, vn, cache_seqlens=lengths(device, 9, 38, 0), cache_batch_idx=index, causal=True)
    pad = lengths(device, 0, 11, 40)
    hold(q, k, v, cache_seqlens=40, cache_leftpad=pad, cache_batch_idx=index.long(), causal=True, num_splits=3)
    hold(q, k, v, cache_seqlens=30, cache_leftpad=pad.long(), window_size=(12, 0))


def test_strides(hold, device):
    """Caches with heads outermost, as transformers keeps them, sliced ones, and queries of a projection."""
    q, k, v = make(2, 2, 4, 2, 16, 30, torch.float32, device)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    kn, vn = tensor((2, 2, 2, 2, 16), torch.float32, device).unbind(2)
    q = tensor((2, 2, 8, 32), torch.float32, device)[:, :, ::2, ::2]
    hold(q, k, v, kn, vn, cache_seqlens=lengths(device, 27, 3), causal=True)
    wide = tensor((2, 30, 2, 2, 32), torch.float32, device)
    k, v = wide[..., 0, ::2], wide[..., 1, 1::2]
    table = torch.arange(8, device=device).view(2, 4)[:, ::2].int()  # of pages of 10, of two rows
    hold(q, k, v, kn, vn, cache_seqlens=lengths(device, 27, 3)[[1, 0]], causal=True)
    pk, pv = (t.reshape(6, 10, 2, 16) for t in (k, v))
    hold(q, pk, pv, kn, vn, cache_seqlens=lengths(device, 3, 12), block_table=table.clamp(max=5))
    hold(q, tensor((1, 30, 2, 16), device=device).expand(2, -1, -1, -1), v, cache_seqlens=30)


def test_strides_of_numbers_per_sequence_and_head(hold, device):
    q, k, v = make(2, 2, 4, 2, 16, 30, torch.float32, device)
    kn, vn = (tensor((2, 2, 2, 16), torch.float32, device) for _ in range(2))
    sinks, slopes = tensor((4, 2), torch.float32, device)[:, 0], tensor((2, 8), torch.float32, device).abs()[:, ::2]
    lens, first, row = (lengths(device, *n)[::2] for n in ((20, 29, 9), (3, 28, 1), (1, 7, 0)))
    for splits in (1, 2):
        hold(q, k, v, kn, vn, cache_seqlens=lens, cache_leftpad=first, cache_batch_idx=row, s_aux=sinks,
             alibi_slopes=slopes, causal=True, num_splits=splits)  # fmt: skip
    hold(q, k, v, kn, vn, cache_seqlens=lens[:1].expand(2), s_aux=sinks[:1].expand(4))


def test_pages_that_are_not_reached_may_be_any(hold, device):
    q, k, v = make(2, 1, 4, 2, 16, 8, torch.float32, device)
    table = torch.tensor([[1, 10**6], [0, -7]], dtype=torch.int32, device=device)
    hold(q, k, v, cache_seqlens=lengths(device, 3, 8), block_table=table)


def test_lengths_beyond_the_capacity_are_the_capacity(hold, device):
    q, k, v = make(2, 1, 4, 2, 16, 8, torch.float32, device)
    for n in (9, 2**31 + 5, 2**40):  # more than int32 holds, too
        kn = torch.ones(2, 1, 2, 16, device=device)
        hold(q, k, v, kn, kn, cache_seqlens=torch.tensor([n, 4], device=device))


def test_nan_and_inf(family, device):
    """Of keys that are seen they show; of what is no key, or is not seen, they do not."""
    q, k, v = make(4, 1, 2, 1, 16, 50, torch.float32, device)
    lens = lengths(device, 40, 40, 40, 40)
    clean = family.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, num_splits=2)
    k[:, 40:], v[:, 40:] = NAN, INF
    assert torch.equal(family.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, num_splits=2), clean)
    k[0, 3, 0, 5], v[1, 39, 0, 2], k[3, 20] = NAN, NAN, INF
    q[3] = 1.0
    for splits in (1, 2):
        out, lse = family.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, num_splits=splits, return_softmax_lse=True
        )
        assert out[0].isnan().all() and lse[0].isnan().all() and out[3].isnan().all()
        assert out[1, ..., 2].isnan().all() and out[1, ..., 3:].isfinite().all() and lse[1].isfinite().all()
        assert torch.equal(out[2], clean[2]) or splits == 1
        far = family.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, num_splits=splits, window_size=(10, 0))
        assert far[0].isfinite().all()


def test_no_keys(hold, device):
    """A result of 0, or of the sinks alone."""
    q, k, v = make(2, 2, 4, 2, 16, 8, torch.float32, device)
    for options in ({"cache_seqlens": 0}, {"cache_leftpad": lengths(device, 8, 9)}, {"cache_seqlens": -3}):
        out, lse = hold(q, k, v, num_splits=2, **options)
        assert not out.any() and (lse == -INF).all()
    sinks = torch.arange(4.0, device=device)
    out, lse = hold(q, k, v, cache_seqlens=0, s_aux=sinks)
    assert not out.any() and torch.equal(lse[0, :, 0], sinks)
    hold(q, k, v, cache_seqlens=1, s_aux=torch.full((4,), -INF, device=device), causal=True)
    hold(q, k[:, :0], v[:, :0])


@pytest.mark.parametrize("B, S", [(0, 1), (2, 0)])
def test_empty(hold, device, B, S):
    q, k, v = make(B, S, 4, 2, 16, 8, torch.float32, device)
    hold(q, k, v)
    hold(q, k, v, k[:, :S], v[:, :S], cache_seqlens=2)


def test_splits_agree_and_repeat(family, device):
    q, k, v = make(1, 1, 8, 1, 32, 300, torch.bfloat16, device)
    runs = {n: family.flash_attn_with_kvcache(q, k, v, cache_seqlens=290, num_splits=n) for n in (0, 1, 2, 7, 128)}
    for n, out in runs.items():
        assert_close(out, runs[1].double())
        assert torch.equal(out, family.flash_attn_with_kvcache(q, k, v, cache_seqlens=290, num_splits=n))


def test_calls_of_one_kind(hold, device):
    """The second and later are replayed, with their own tensors, lengths and caches."""
    for n in (3, 9, 17):
        q, k, v = make(2, 1, 4, 2, 16, 24, torch.float32, device)
        kn, vn = (tensor((2, 1, 2, 16), torch.float32, device) for _ in range(2))
        hold(q, k, v, kn, vn, cache_seqlens=lengths(device, n, 23 - n), num_splits=2)


DEVICES = {
    "h200": (132, 232448),
    "a100": (108, 166912),
    "t4": (40, 65536),
    "mi300": (304, 65536),
    "interpreter": (2, 65536),
}


@pytest.mark.parametrize("name", DEVICES)
def test_plans(internals, name):
    """They fit, fill the device where there are keys enough, and give no split less than a few keys."""
    sms, shared = DEVICES[name]
    plan = internals("_attention_decode").plan
    for sequences in (1, 8, 32, 33, 512, 4096):
        for rows in (1, 4, 12, 64, 300):
            for keys in (0, 1, 100, 8192, 131072):
                for D, itemsize in ((16, 2), (72, 2), (128, 2), (256, 2), (128, 4), (256, 4), (256, 8)):
                    p = plan(sequences, rows, keys, D, itemsize, sms, shared)
                    width = max(16, 1 << (D - 1).bit_length()) * itemsize
                    assert 16 <= p.BLOCK_M <= 64 and 1 <= p.SPLITS <= 128
                    assert (p.num_stages - 1 or 1) * 2 * p.BLOCK_N * width <= shared
                    assert p.SPLITS == 1 or keys / p.SPLITS >= 64
                    if keys == 131072 and rows == 1:
                        assert sequences * p.SPLITS >= min(sms, 120 * sequences)
    assert plan(8, 4, 8192, 128, 2, sms, shared, 5).SPLITS == 5


def test_signature(kernel, family):
    """Consumers read it: names, order and defaults are flash-attention's."""
    names = list(inspect.signature(family.flash_attn_with_kvcache).parameters)
    assert names == list(inspect.signature(family.flash_attn_with_kvcache_reference).parameters)
    assert names[:10] == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad",
    ]  # fmt: skip


def test_bad_input(family, device):
    q, k, v = make(2, 1, 4, 2, 16, 8, torch.float32, device)
    kn = tensor((2, 1, 2, 16), torch.float32, device)
    table, cos = torch.zeros(2, 4, dtype=torch.int32, device=device), tensor((9, 4), torch.float32, device)
    call = family.flash_attn_with_kvcache
    op = "flash_attn_with_kvcache"
    cases = [
        (TypeError, "q must be a tensor, got int", lambda: call(1, k, v)),
        (TypeError, "v_cache must be a tensor, got NoneType", lambda: call(q, k, None)),
        (ValueError, "num_splits must be an integer of at least 0, got '2'", lambda: call(q, k, v, num_splits="2")),
        (TypeError, "rotary_interleaved must be True or False, got 2", lambda: call(q, k, v, rotary_interleaved=2)),
        (ValueError, "q must have 4 dimensions, got shape (1, 4, 16)", lambda: call(q[0], k, v)),
        (TypeError, "v_cache must have q's dtype torch.float32, got torch.float16", lambda: call(q, k, v.half())),
        (ValueError, "q must have a head dimension from 1 to 256, got 257", lambda: call(
            torch.zeros(2, 1, 4, 257, device=device), k, v)),
        (ValueError, "q must have a multiple of the 2 heads of k_cache, got 3", lambda: call(q[:, :, :3], k, v)),
        (ValueError, "k_cache must have shape (2, 8, 2, 16), got (2, 8, 2, 8)", lambda: call(q, k[..., :8], v)),
        (ValueError, "v_cache must have shape (2, 8, 2, 16), got (2, 7, 2, 16)", lambda: call(q, k, v[:, :7])),
        (ValueError, "k and v must come together, got k alone", lambda: call(q, k, v, kn, cache_seqlens=1)),
        (ValueError, "k must have shape (2, 1, 2, 16), got (1, 1, 2, 16)", lambda: call(
            q, k, v, kn[:1], kn, cache_seqlens=1)),
        (ValueError, "cache_seqlens must say where k goes, got None", lambda: call(q, k, v, kn, kn)),
        (TypeError, "cache_seqlens must be an int32 | int64 tensor, got float", lambda: call(
            q, k, v, cache_seqlens=1.0)),
        (TypeError, "cache_leftpad must be an int32 | int64 tensor, got torch.float32", lambda: call(
            q, k, v, cache_leftpad=torch.zeros(2, device=device))),
        (ValueError, "cache_seqlens must have shape (2,), got (3,)", lambda: call(
            q, k, v, cache_seqlens=lengths(device, 1, 2, 3))),
        (ValueError, "block_table must have shape (2, 4), got (1, 4)", lambda: call(q, k, v, block_table=table[:1])),
        (ValueError, "cache_batch_idx must be None with block_table, got both", lambda: call(
            q, k, v, block_table=table, cache_batch_idx=table[:, 0])),
        (ValueError, "k_cache must have a row for each of 2 sequences, got 1", lambda: call(q, k[:1], v[:1])),
        (ValueError, "rotary_cos, rotary_sin and k must come together", lambda: call(
            q, k, v, rotary_cos=cos, rotary_sin=cos)),
        (ValueError, "rotary_cos must have shape (positions, at most 8), got (9, 12)", lambda: call(
            q, k, v, kn, kn, torch.zeros(9, 12, device=device), cos, cache_seqlens=1)),
        (ValueError, "alibi_slopes must have shape (4,) or (2, 4), got (2,)", lambda: call(
            q, k, v, alibi_slopes=torch.zeros(2, device=device))),
        (ValueError, "s_aux must have shape (4,), got (2,)", lambda: call(
            q, k, v, s_aux=torch.zeros(2, device=device))),
        (ValueError, "window_size must be two integers (left, right), got (1,)",
         lambda: call(q, k, v, window_size=(1,))),
        (ValueError, "window_size must be two integers (left, right), got (None, 0)",
         lambda: call(q, k, v, window_size=(None, 0))),
        (ValueError, "softcap must be at least 0, got -1", lambda: call(q, k, v, softcap=-1)),
        (TypeError, "causal must be True or False, got 1", lambda: call(q, k, v, causal=1)),
        (ValueError, "k_cache must be on", lambda: call(q, k.to("meta"), v)),
    ]  # fmt: skip
    for error, message, do in cases:
        with pytest.raises(error) as caught:
            do()
        assert str(caught.value).startswith(f"{op}: {message}")


def attend_args(q, k, v, lens, **options):
    given = dict(cos=None, sin=None, seqlens=lens, batch_idx=None, leftpad=None, table=None, alibi=None, sinks=None)
    given.update(cached=0, new=0, scale=0.3, left=None, right=None, softcap=0.0, interleaved=True, num_splits=0)
    return (q, k, v, *{**given, **options}.values())


def test_opcheck(family, device):
    q, k, v = make(2, 2, 4, 2, 16, 40, torch.float32, device)
    kn, vn = (tensor((2, 2, 2, 16), torch.float32, device) for _ in range(2))
    lens = lengths(device, 30, 3)
    opcheck(family.kv_cache_attention_fwd, attend_args(q, k, v, lens))
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    opcheck(family.kv_cache_attention_fwd, attend_args(q, k, v, None, cached=20, right=0, softcap=1.0, num_splits=2))
    args = kn, vn, k, v, None, None, lens, None, None, 0, False
    opcheck(family.kv_cache_append_fwd, args)


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    q, k, v = make(2, 2, 4, 2, 16, 40, torch.bfloat16, device)
    args = attend_args(q, k, v, lengths(device, 40, 3), right=0)
    assert all(torch.equal(a, b) for a, b in zip(family._attend(*args), family.kv_cache_attention_fwd(*args)))


def test_compile(family, device, backend):
    q, k, v = make(2, 1, 4, 2, 16, 40, torch.float32, device)
    kn, vn = (tensor((2, 1, 2, 16), torch.float32, device) for _ in range(2))
    lens = lengths(device, 30, 3)

    def step(q, k, v, kn, vn, lens):
        out = family.flash_attn_with_kvcache(q * 2, k, v, kn, vn, cache_seqlens=lens, causal=True)
        return family.flash_attn_with_kvcache(out, k, v, kn + 1, vn, cache_seqlens=lens + 1, causal=True)

    caches = [t.clone() for t in (k, v)]
    expected = step(q, *caches, kn, vn, lens)
    assert_close(torch.compile(step, fullgraph=True, backend=backend)(q, k, v, kn, vn, lens), expected.double())
    assert torch.equal(k, caches[0]) and torch.equal(v, caches[1])


def test_backward_raises(family, device):
    """It does not lose a gradient in silence."""
    q, k, v = make(1, 1, 2, 2, 16, 8, torch.float32, device)
    out = family.flash_attn_with_kvcache(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()


def test_inference_mode(family, device):
    with torch.inference_mode():
        q, k, v = make(1, 1, 2, 2, 16, 8, torch.float32, device)
        out = family.flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=3)
    assert torch.equal(k[:, 3], q[:, 0]) and out.shape == q.shape


def test_graph_follows_the_lengths(family, device):
    """A captured call reads lengths and tables when it is replayed."""
    if device.type != "cuda":
        pytest.skip("no graphs on this device")
    q, k, v = make(2, 1, 8, 2, 64, 600, torch.bfloat16, device)
    kn, vn = (tensor((2, 1, 2, 64), torch.bfloat16, device) for _ in range(2))
    lens = lengths(device, 5, 60)
    call = lambda: family.flash_attn_with_kvcache(q, k, v, kn, vn, cache_seqlens=lens)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    lens.copy_(lengths(device, 500, 1))
    graph.replay()
    assert torch.equal(out, call()) and torch.equal(k[0, 500], kn[0, 0])


def test_offsets_beyond_two_to_the_31(family, device):
    if device.type == "cpu" or torch.cuda.get_device_properties(device).total_memory < 30e9:
        pytest.skip("needs 10 GB of the device's memory")
    n = 2**31 // (16 * 8 * 128) + 8
    k = torch.zeros(n, 16, 8, 128, dtype=torch.bfloat16, device=device)
    q, kn, vn = (tensor((1, 1, h, 128), torch.bfloat16, device) for h in (8, 8, 8))
    table = torch.tensor([[n - 1, n - 2]], dtype=torch.int32, device=device)
    out = family.flash_attn_with_kvcache(q, k, k, kn, kn, cache_seqlens=17, block_table=table)
    assert torch.equal(k[n - 2, 1], kn[0, 0]) and out.isfinite().all()
    small = k[n - 2 :].flip(0).flatten(0, 1)[None]
    assert torch.equal(out, family.flash_attn_with_kvcache(q, small, small, cache_seqlens=18))
