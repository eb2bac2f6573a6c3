import pytest
import torch
from _inputs import LAYOUTS, tensor, vast
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

NAN, INF = float("nan"), float("inf")

# B, S, heads of q, heads of k, D, rotated: grouped heads, one head, odd heads, tokens equal to heads, GPT-NeoX's 80/20
SHAPES = [(2, 5, 4, 2, 16, 16), (1, 3, 1, 1, 8, 8), (2, 4, 4, 4, 8, 4), (1, 7, 3, 1, 80, 20), (3, 1, 5, 5, 6, 2)]


@pytest.fixture(scope="module")
def family(internals):
    return internals("rotary")


@pytest.fixture(scope="module")
def rotary(family):
    return family.rotary


@pytest.fixture(scope="module")
def apply(family):
    return family.apply_rotary_pos_emb


@pytest.fixture(scope="module")
def qk_norm_rotary(family):
    return family.qk_norm_rotary


def tables(shape, dtype=torch.float32, device="cpu", interleaved=False):
    """cos and sin of random angles, each angle in the table twice."""
    angles = tensor((*shape[:-1], shape[-1] // 2), torch.float64, scale=3.0)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def heads(B, H, S, D, dtype=torch.float32, device="cpu"):
    """(B, H, S, D) as models make it: a view of (B, S, H, D)."""
    return tensor((B, S, H, D), dtype, device).transpose(1, 2)


def close(ours, theirs, name="result"):
    """Whether results and gradients of two formulas in one dtype agree to rounding."""
    for a, b in zip(ours, theirs):
        assert a.dtype == b.dtype
        assert_close(a, b.double(), name=name, ulps=4)


# The reference first: it is the oracle of everything below.


def huggingface():
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    return apply_rotary_pos_emb


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_huggingface(family, shape):
    B, S, H, K, D, R = shape
    q, k, cos, sin = heads(B, H, S, D), heads(B, K, S, D), *tables((B, S, R))
    for dim in (1, 2):
        given = (q, k) if dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))
        runs = [
            evaluate(lambda *t: f(*t, unsqueeze_dim=dim), (*given, cos, sin), {}, list(map(torch.ones_like, given)))  # noqa: B023
            for f in (family.apply_rotary_pos_emb_reference, huggingface())
        ]
        close(runs[0][0], runs[1][0])
        close(runs[0][1], runs[1][1], "gradient")


def test_reference_is_huggingface_interleaved(family):
    """GLM: tables of halves, of which the first is repeated next to itself; Cohere's formula, in 16 bits."""
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm

    q, k = heads(2, 4, 5, 16), heads(2, 2, 5, 16)
    cos, sin = tables((2, 5, 8))
    ours = [family.rotary_reference(x, cos[..., :4], sin[..., :4], interleaved=True, rotary_dim=8) for x in (q, k)]
    close(ours, glm(q, k, cos, sin))
    q, k = q.bfloat16(), k.bfloat16()
    cos, sin = tables((2, 5, 16), interleaved=True)
    ours = family.apply_rotary_pos_emb_reference(q, k, cos, sin, interleaved=True)
    close([t.bfloat16() for t in ours], cohere(q, k, cos, sin))


def test_reference_is_huggingface_multimodal(family):
    """Qwen2-VL's formula over (3, B, S, D) tables, and its vision tower's over float32 tables of packed patches."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    section = [1, 3, 4]
    q, k, cos, sin = heads(2, 4, 5, 16), heads(2, 2, 5, 16), *tables((3, 2, 5, 16))
    picked = [torch.cat([m[i % 3] for i, m in enumerate(t.split(section * 2, -1))], -1) for t in (cos, sin)]
    ours = family.apply_rotary_pos_emb_reference(q, k, cos, sin, mrope_section=section)
    close(ours, huggingface()(q, k, *picked))
    q, k, cos, sin = (
        tensor((9, 4, 16), torch.bfloat16),
        tensor((9, 4, 16), torch.bfloat16),
        *tables((9, 16)),
    )
    close([family.rotary_reference(x, cos, sin) for x in (q, k)], apply_rotary_pos_emb_vision(q, k, cos, sin))


def test_reference_of_norm_is_huggingface(family):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    norm = Qwen3RMSNorm(16, eps=1e-6).to(torch.bfloat16)
    norm.weight.data = tensor((16,), torch.bfloat16)
    q, k, cos, sin = (
        heads(2, 4, 5, 16, torch.bfloat16),
        heads(2, 2, 5, 16, torch.bfloat16),
        *tables((2, 5, 16)),
    )
    ours = family.qk_norm_rotary_reference(q, k, norm.weight, norm.weight, cos, sin, casting="before_weight")
    close(ours, apply_rotary_pos_emb(norm(q), norm(k), cos, sin))


# Then what users call.


@pytest.mark.kernels_ci
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(apply, family, device, dtype, interleaved):
    q, k = heads(2, 4, 5, 80, dtype, device), heads(2, 3, 5, 80, dtype, device)
    cos, sin = tables((2, 5, 20), dtype, device, interleaved)
    y, z = check(apply, family.apply_rotary_pos_emb_reference, q, k, cos, sin, interleaved=interleaved)
    assert y.dtype == z.dtype == dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_orders(apply, family, device, shape):
    B, S, H, K, D, R = shape
    q, k, (cos, sin) = heads(B, H, S, D, device=device), heads(B, K, S, D, device=device), tables((B, S, R))
    cos, sin = cos.to(device), sin.to(device)
    check(apply, family.apply_rotary_pos_emb_reference, q, k, cos, sin)
    check(apply, family.apply_rotary_pos_emb_reference, q.contiguous(), k, cos[:1], sin[:1])
    q, k = q.transpose(1, 2), k.transpose(1, 2).contiguous()
    y, z = check(apply, family.apply_rotary_pos_emb_reference, q, k, cos, sin, unsqueeze_dim=2)
    assert torch.equal(apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)[0], y.transpose(1, 2))


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float64")])
def test_promotes_as_the_formula(apply, family, device, dtypes):
    first, second = (getattr(torch, name) for name in dtypes)
    q, k, (cos, sin) = heads(1, 2, 3, 8, first, device), heads(1, 2, 3, 8, second, device), tables((1, 3, 8), second)
    cos, sin = cos.to(device), sin.to(device)
    y, z = check(apply, family.apply_rotary_pos_emb_reference, q, k, cos, sin)
    expected = huggingface()(q, k, cos, sin)
    assert (y.dtype, z.dtype) == (expected[0].dtype, expected[1].dtype)


def test_no_less_exact_than_the_formula(apply, family, device):
    """In bfloat16, where models round both products and their sum."""
    q, k = heads(2, 4, 16, 64, torch.bfloat16, device), heads(2, 2, 16, 64, torch.bfloat16, device)
    cos, sin = tables((2, 16, 64), torch.bfloat16, device)
    exact = family.apply_rotary_pos_emb_reference(q.double(), k.double(), cos.double(), sin.double())
    for y, theirs, e in zip(apply(q, k, cos, sin), huggingface()(q, k, cos, sin), exact):
        assert torch.equal(y, e.bfloat16())
        assert (theirs - e).abs().mean() > 1.2 * (y - e).abs().mean()


def test_one_of_two(apply, qk_norm_rotary, family, device):
    q, w, (cos, sin) = heads(2, 3, 4, 8, device=device), tensor((8,), device=device), tables((2, 4, 8), device=device)
    y, none = apply(q, None, cos, sin)
    assert none is None and torch.equal(y, apply(q, q, cos, sin)[0])
    none, y = apply(None, q, cos, sin)
    check(lambda q: apply(None, q, cos, sin)[1], lambda q: family.rotary_reference(q, cos.cpu(), sin.cpu()), q)
    assert none is None and torch.equal(y, apply(q, q, cos, sin)[1])
    none, z = qk_norm_rotary(None, q, None, w, cos, sin)
    assert none is None and torch.equal(z, qk_norm_rotary(q, q, None, w, cos, sin)[1])
    z, none = qk_norm_rotary(q, None, w, None, cos, sin)
    assert none is None and torch.equal(z, qk_norm_rotary(q, q, w, None, cos, sin)[0])


def test_one_result_used(apply, device):
    for pick in (0, 1):
        q, k = (heads(1, 2, 3, 8, device=device).requires_grad_() for _ in range(2))
        cos, sin = tables((1, 3, 8), device=device)
        apply(q, k, cos, sin)[pick].sum().backward()
        used, unused = (k, q) if pick else (q, k)
        assert used.grad.abs().sum() > 0 and (unused.grad is None or not unused.grad.any())


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_turns_back(rotary, family, device, interleaved):
    x, (cos, sin) = heads(2, 3, 5, 20, device=device), tables((2, 5, 12), device=device, interleaved=interleaved)
    options = {"interleaved": interleaved}
    y = rotary(x, cos, sin, **options)
    assert_close(rotary(y, cos, sin, inverse=True, **options), x.double())
    assert torch.equal(rotary(x, cos, sin, inverse=True, **options), rotary(x, cos, -sin, **options))
    check(rotary, family.rotary_reference, x, cos, sin, inverse=True, **options)
    (dx,) = torch.autograd.grad(rotary(x.requires_grad_(), cos, sin, **options), x, y)
    assert torch.equal(dx, rotary(y, cos, sin, inverse=True, **options)) and torch.equal(dx[..., 12:], y[..., 12:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_any_table(rotary, family, device, interleaved):
    """Tables whose halves differ are used as the formula uses them, and transposed on the way back."""
    x, cos, sin = tensor((2, 3, 4, 10), device=device), *(tensor((2, 4, 6), device=device) for _ in range(2))
    for inverse in (False, True):
        check(rotary, family.rotary_reference, x, cos, sin, interleaved=interleaved, inverse=inverse)


def test_table_forms(rotary, family, device):
    """(S, R) and (1, S, R), shared by the batch; without the repeated angles; expanded; strided; both orders of x."""
    x, (cos, sin) = heads(3, 2, 4, 8, device=device), tables((4, 8), device=device)
    expected = rotary(x, cos.expand(3, 4, 8).contiguous(), sin.expand(3, 4, 8).contiguous())
    assert_close(expected, family.rotary_reference(x, cos, sin).double())
    for change in (lambda t: t, lambda t: t[None], lambda t: t.expand(3, 4, 8), lambda t: t.t().contiguous().t()):
        assert torch.equal(rotary(x, change(cos), change(sin)), expected)
    assert torch.equal(rotary(x, cos[:, :4], sin[:, :4], rotary_dim=8), expected)
    assert torch.equal(rotary(x.transpose(1, 2), cos, sin, heads_dim=2).transpose(1, 2), expected)
    assert torch.equal(rotary(x[0], cos, sin, heads_dim=0), expected[0])
    assert torch.equal(rotary(x[0].transpose(0, 1), cos, sin), expected[0].transpose(0, 1))
    pairs = torch.stack((x[..., :4], x[..., 4:]), -1).flatten(-2)
    y = rotary(pairs, cos[:, :4], sin[:, :4], rotary_dim=8, interleaved=True)
    assert torch.equal(torch.cat((y[..., ::2], y[..., 1::2]), -1), expected)


POSITIONS = {
    "ids": (dict(position_ids=torch.tensor([[3, 0, 9, 2], [1, 1, 5, 8]])), 2),
    "ids of all": (dict(position_ids=torch.tensor([3, 0, 9, 2], dtype=torch.int32)), 2),
    "one row of ids": (dict(position_ids=torch.tensor([[3, 0, 9, 2]])), 2),
    "offsets": (dict(offsets=torch.tensor([6, 1])), 2),
    "one offset": (dict(offsets=4), 2),
    "packed": (dict(cu_seqlens=torch.tensor([0, 3, 3, 4, 10], dtype=torch.int32)), None),
    "packed, offsets": (dict(cu_seqlens=torch.tensor([0, 3, 3, 9]), offsets=torch.tensor([7, 2, 1])), None),
    "packed, one offset": (dict(cu_seqlens=torch.tensor([0, 6, 10]), offsets=3), None),
    "packed, one token each": (dict(cu_seqlens=torch.arange(11), offsets=torch.arange(10).flip(0)), None),
    "packed ids": (dict(position_ids=torch.tensor([0, 1, 2, 0, 1, 0, 9, 8, 7, 7])), None),
}


@pytest.mark.parametrize("case", POSITIONS)
def test_positions(rotary, family, device, case):
    positions, B = POSITIONS[case]
    x = tensor((10, 3, 12), device=device) if B is None else heads(B, 3, 4, 12, device=device)
    cos, sin = tables((10, 8), device=device)
    on = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in positions.items()}
    check(lambda *t: rotary(*t, **on), lambda *t: family.rotary_reference(*t, **positions), x, cos, sin)
    half = rotary(x, cos[:, :4], sin[:, :4], rotary_dim=8, **on)
    assert torch.equal(half, rotary(x, cos, sin, **on))


def test_positions_are_those_of_each_sequence(rotary, device):
    """What the positions mean, told by slicing."""
    lengths, (cos, sin) = [3, 1, 0, 5], tables((9, 8), device=device)
    x = tensor((9, 2, 8), device=device)
    ends = torch.tensor([0, 3, 4, 4, 9], device=device)
    apart = [rotary(part, cos[: len(part)], sin[: len(part)]) for part in x.split(lengths)]
    assert torch.equal(rotary(x, cos, sin, cu_seqlens=ends), torch.cat(apart))
    y = heads(2, 2, 3, 8, device=device)
    apart = [rotary(y[i], cos[n : n + 3], sin[n : n + 3], heads_dim=0) for i, n in enumerate((5, 2))]
    assert torch.equal(rotary(y, cos, sin, offsets=torch.tensor([5, 2], device=device)), torch.stack(apart))


def test_positions_past_the_table(rotary, device):
    """They show as NaN, and nothing outside the table is read. The rest is as it would be."""
    x, (cos, sin) = tensor((1, 2, 5, 8), device=device), tables((4, 6), device=device)
    ids = torch.tensor([0, -1, 3, 4, 2**40], device=device)
    y = rotary(x, cos, sin, position_ids=ids)
    assert y[:, :, [1, 3, 4], :6].isnan().all() and torch.equal(y[..., 6:], x[..., 6:])
    assert torch.equal(y[:, :, [0, 2]], rotary(x[:, :, [0, 2]].contiguous(), cos[[0, 3]], sin[[0, 3]]))
    y = rotary(x, cos, sin, offsets=torch.tensor([2], device=device))
    assert torch.equal(y[..., :6].isnan().any(-1)[0, 0].cpu(), torch.tensor([False, False, True, True, True]))


@pytest.mark.parametrize("section", [[1, 3, 4], [5, 3], [0, 8, 0]])
@pytest.mark.parametrize("interleaved", [False, True])
def test_multiple_axes(rotary, apply, family, device, section, interleaved):
    x, k = heads(2, 3, 5, 20, device=device), heads(2, 1, 5, 20, device=device)
    A, options = len(section), {"mrope_section": section, "interleaved": interleaved}
    cos, sin = tables((A, 2, 5, 16), device=device, interleaved=interleaved)
    check(rotary, family.rotary_reference, x, cos, sin, **options)
    check(rotary, family.rotary_reference, x, cos[..., :8], sin[..., :8], rotary_dim=16, **options)
    check(apply, family.apply_rotary_pos_emb_reference, x, k, cos, sin, **options)
    cos, sin = tables((9, 16), device=device, interleaved=interleaved)
    ids = torch.randint(9, (A, 2, 5))
    check(
        lambda *t: rotary(*t, position_ids=ids.to(device), **options),
        lambda *t: family.rotary_reference(*t, position_ids=ids, **options),
        x, cos, sin,
    )  # fmt: skip


@pytest.mark.parametrize("D, R", [(1, 0), (3, 2), (127, 126), (128, 128), (129, 64), (1000, 1000)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_widths(rotary, family, device, D, R, interleaved):
    x, (cos, sin) = heads(1, 2, 2, D, device=device), tables((2, R), device=device, interleaved=interleaved)
    check(rotary, family.rotary_reference, x, cos, sin, interleaved=interleaved)


@pytest.mark.parametrize("D, R", [(65537, 2), (262144, 131072)])
def test_widest(rotary, family, device, D, R):
    x, (cos, sin) = tensor((1, 1, 1, D), device=device), tables((1, R), device=device)
    check(rotary, family.rotary_reference, x, cos, sin, interleaved=D % 2 == 1)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (2, 4, 2, 0), (0, 2, 8)])
def test_empty(rotary, apply, qk_norm_rotary, device, shape):
    x = tensor(shape, device=device).requires_grad_()
    cos, sin = tables((shape[-3] if len(shape) == 3 else shape[2], shape[-1]), device=device)
    y = rotary(x, cos, sin)
    assert y.shape == x.shape and torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    if len(shape) == 4:
        w = tensor(shape[-1:], device=device).requires_grad_()
        for y, z in (apply(x, x, cos[None], sin[None]), qk_norm_rotary(x, x, w, None, cos[None], sin[None])):
            assert y.shape == z.shape == x.shape
        assert (torch.autograd.grad(y.sum(), w)[0] == 0).all()


def test_no_heads_in_k(apply, device):
    q, k, (cos, sin) = heads(2, 3, 4, 8, device=device), heads(2, 0, 4, 8, device=device), tables((2, 4, 8))
    y, z = apply(q, k, cos.to(device), sin.to(device))
    assert z.shape == k.shape and torch.equal(y, apply(q, None, cos.to(device), sin.to(device))[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(apply, qk_norm_rotary, family, device, layout):
    q, k = tensor((2, 3, 4, 12), torch.float32, device, layout), tensor((2, 2, 4, 12), torch.float32, device)
    cos, sin = (tensor((2, 4, 8), torch.float32, device, layout) for _ in range(2))
    w = tensor((12,), torch.float32, device, "columns_sliced")
    for grad_layout in ("contiguous", layout):
        grads = [tensor(t.shape, torch.float32, device, grad_layout) for t in (q, k)]
        check(apply, family.apply_rotary_pos_emb_reference, q, k, cos, sin, grads=grads)
        check(qk_norm_rotary, family.qk_norm_rotary_reference, k, q, w, w, cos, sin, grads=grads[::-1])


def test_results_lie_as_inputs(apply, rotary, device, on_kernels):
    """In the order of the input's memory: what a model reshapes next is no copy, forward and backward."""
    cos, sin = tables((2, 5, 8), device=device)
    fused = tensor((2, 5, 3 * 4, 8), device=device)
    for x in (
        heads(2, 4, 5, 8, device=device),
        tensor((2, 4, 5, 8), device=device),
        fused.transpose(1, 2)[:, 4:8],
        tensor((5, 2, 4, 8), device=device).permute(1, 2, 0, 3),
    ):
        expected = (x + 0).stride()
        y, z = apply(x.requires_grad_(), x, cos, sin)
        assert y.stride() == z.stride() == expected == rotary(x, cos, sin).stride()
        for g in (torch.ones(2, 4, 5, 8, device=device), torch.ones((), device=device).expand(2, 4, 5, 8)):
            (dx,) = torch.autograd.grad(y, x, g, retain_graph=True)
            assert dx.stride() == expected or not on_kernels  # where there are none, dx is as torch makes it
    assert rotary(cos[:1, None].expand(2, 4, 5, 8), cos, sin).is_contiguous()


def test_special_values(rotary, apply, device):
    x, (cos, sin) = tensor((1, 1, 6, 8), device=device), tables((1, 6, 8), device=device)
    x[0, 0, 0, 1], x[0, 0, 1, 2], x[0, 0, 2, 6], x[0, 0, 3] = NAN, INF, -INF, -INF
    cos[0, 4, 0], x[0, 0, 5] = NAN, 0.0
    (expected, _) = huggingface()(x.cpu().double(), x.cpu().double(), cos.cpu().double(), sin.cpu().double())
    assert_close(rotary(x, cos, sin), expected)
    assert_close(apply(x, x, cos, sin)[1], expected)


@pytest.mark.parametrize("casting, offset", [("before_weight", 0.0), ("after_weight", 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_matches_reference(qk_norm_rotary, family, device, dtype, casting, offset):
    """In float64 throughout, which the roundings between the two calls are not: half an ulp for each of them."""
    q, k = heads(2, 4, 5, 24, dtype, device), heads(2, 3, 5, 24, dtype, device)
    cos, sin = tables((2, 5, 12), dtype, device)
    wq, wk = tensor((24,), dtype, device), tensor((24,), dtype, device)
    ulps = 3 if dtype in (torch.float16, torch.bfloat16) else None
    for interleaved in (False, True):
        options = {"casting": casting, "offset": offset, "interleaved": interleaved, "eps": 1e-5}
        check(
            lambda *t: qk_norm_rotary(t[0], t[1], t[4], t[5], t[2], t[3], **options),  # noqa: B023
            lambda *t: family.qk_norm_rotary_reference(t[0], t[1], t[4], t[5], t[2], t[3], **options),  # noqa: B023
            q, k, cos, sin, wq, wk, ulps=ulps,
        )  # fmt: skip


@pytest.mark.parametrize("D, R", [(1, 0), (3, 2), (128, 128), (129, 64), (80, 20), (4096, 4096), (8193, 64)])
def test_norm_widths(qk_norm_rotary, family, device, D, R):
    q, k = heads(1, 3, 2, D, device=device), heads(1, 1, 2, D, device=device)
    w, (cos, sin) = tensor((D,), device=device), tables((1, 2, R), device=device)
    slack = 16 * 2**-23 * float((5 * w / torch.cat((q, k), 1)).abs().max()) if D == 1 else 0.0  # dx cancels to about 0
    check(
        lambda q, k, w: qk_norm_rotary(q, k, w, w, cos, sin),
        lambda q, k, w: family.qk_norm_rotary_reference(q, k, w, w, cos.cpu(), sin.cpu()),
        q, k, w, slack=slack,
    )  # fmt: skip


def test_norm_of_many_tokens(qk_norm_rotary, family, device):
    """More tiles than programs that sum the weight's gradient."""
    q, w = heads(1, 1, 70, 512, device=device), tensor((512,), device=device)
    cos, sin = tables((1, 70, 512), device=device)
    check(
        lambda q, w: qk_norm_rotary(q, None, w, None, cos, sin)[0],
        lambda q, w: family.qk_norm_rotary_reference(q, None, w, None, cos.cpu(), sin.cpu())[0],
        q, w,
    )  # fmt: skip


@pytest.mark.parametrize("casting", ["before_weight", "after_weight"])
def test_norm_is_the_two_calls(qk_norm_rotary, apply, kernel, device, casting):
    q, k = heads(2, 4, 8, 64, torch.bfloat16, device), heads(2, 2, 8, 64, torch.bfloat16, device)
    w, (cos, sin) = tensor((64,), torch.bfloat16, device), tables((2, 8, 64), torch.bfloat16, device)
    fused = qk_norm_rotary(q, k, w, None, cos, sin, casting=casting)
    two = apply(*(kernel.rms_norm(x, v, casting=casting) for x, v in ((q, w), (k, None))), cos, sin)
    for a, b in zip(fused, two):
        assert a.dtype == b.dtype and (a == b).float().mean() > 0.999
        assert_close(a, b.double(), ulps=1)
    mixed = qk_norm_rotary(q, k, w.float(), w.float(), cos, sin, casting=casting)
    assert mixed[0].dtype == (torch.float32 if casting == "before_weight" else torch.bfloat16)


def test_norm_special_rows(qk_norm_rotary, family, device):
    x, (cos, sin) = tensor((1, 1, 5, 8), device=device), tables((1, 5, 8), device=device)
    x[0, 0, 0, 1], x[0, 0, 1, 2], x[0, 0, 2], x[0, 0, 3] = NAN, INF, 0.0, 1e25
    wide = [t.cpu().double() for t in (x, cos, sin)]
    expected = family.qk_norm_rotary_reference(wide[0].float().double(), None, None, None, *wide[1:])[0]
    y = qk_norm_rotary(x, None, None, None, cos, sin)[0]
    assert_close(y[:, :, :3], expected[:, :, :3])
    assert (y[:, :, 3] == 0).all()  # squares overflow, as torch's
    assert_close(y[:, :, 4], expected[:, :, 4])


def test_learned_tables(rotary, family, device):
    """Tables that require gradients get them, alone or with x."""
    x, (cos, sin) = heads(2, 3, 4, 8, device=device), tables((4, 6), device=device)
    for needs in ((False, True, False), (True, False, True), (False, True, True)):
        given = [t.detach().requires_grad_(n) for t, n in zip((x, cos, sin), needs)]
        wide = [t.detach().cpu().double().requires_grad_(n) for t, n in zip((x, cos, sin), needs)]
        y, oracle = rotary(*given), family.rotary_reference(*wide)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, [t for t in given if t.requires_grad], dy)
        expected = torch.autograd.grad(oracle, [t for t in wide if t.requires_grad], dy.cpu().double())
        for a, b in zip(found, expected):
            assert_close(a, b)


def test_bad_input(rotary, apply, qk_norm_rotary, device):
    x, (c, s) = heads(2, 3, 4, 8, device=device), tables((2, 4, 8), device=device)
    packed, (pc, ps) = tensor((9, 2, 8), device=device), tables((5, 8), device=device)
    ids = torch.zeros(2, 4, dtype=torch.int64, device=device)
    name = "apply_rotary_pos_emb"
    cases = [
        (TypeError, f"{name}: q or k must be a tensor, got None for both", lambda: apply(None, None, c, s)),
        (TypeError, f"{name}: q must have dtype", lambda: apply(x.long(), x, c, s)),
        (TypeError, f"{name}: cos must be a tensor, got NoneType", lambda: apply(x, x, None, s)),
        (ValueError, f"{name}: k must have shape (2, 3, 4, 8), got (2, 3, 4, 6)",
         lambda: apply(x, x[..., :6], c, s)),
        (ValueError, f"{name}: k must have shape (2, 2, 4, 8), got (2, 2, 3, 8)",
         lambda: apply(x, x[:, :2, :3], c, s)),
        (ValueError, f"{name}: heads must lie in a tensor of 3 or 4 dimensions, got (4, 8)",
         lambda: apply(x[0, 0], None, c, s)),
        (ValueError, f"{name}: unsqueeze_dim must be one of the two dimensions before the last of (2, 3, 4, 8), got 3",
         lambda: apply(x, x, c, s, 3)),
        (ValueError, f"{name}: sin must have shape (2, 4, 8), got (2, 4, 6)", lambda: apply(x, x, c, s[..., :6])),
        (ValueError, f"{name}: cos must have shape (2, 4, 8) or (1, 4, 8) or (4, 8), got (2, 3, 8)",
         lambda: apply(x, x, c[:, :3], s[:, :3])),
        (ValueError, f"{name}: cos must rotate an even number of dimensions up to 8, got 7",
         lambda: apply(x, x, c[..., :7], s[..., :7])),
        (ValueError, f"{name}: cos must rotate an even number of dimensions up to 6, got 8",
         lambda: apply(x[..., :6], None, c, s)),
        (ValueError, f"{name}: mrope_section must be 2 or 3 numbers of pairs with sum 4, got [1, 1]",
         lambda: apply(x, x, c, s, mrope_section=[1, 1])),
        (ValueError, f"{name}: cos must have shape (2, 2, 4, 8) or (2, 1, 4, 8), got (2, 4, 8)",
         lambda: apply(x, x, c, s, mrope_section=[2, 2])),
        (ValueError, f"{name}: sin must be on", lambda: apply(x, x, c, s.to("meta"))),
        (ValueError, "rotary: heads_dim must be one of the two dimensions", lambda: rotary(x, c, s, heads_dim=3)),
        (ValueError, "rotary: rotary_dim must be once or twice cos.shape[-1], got 4 and 8",
         lambda: rotary(x, c, s, rotary_dim=4)),
        (ValueError, "rotary: cos must have shape (positions, 8), got (2, 4, 8)",
         lambda: rotary(x, c, s, position_ids=ids)),
        (TypeError, "rotary: position_ids must have dtype int32 | int64, got float32",
         lambda: rotary(x, pc, ps, position_ids=ids.float())),
        (ValueError, "rotary: position_ids must have shape (2, 4) or (1, 4) or (4,), got (2, 3)",
         lambda: rotary(x, pc, ps, position_ids=ids[:, :3])),
        (ValueError, "rotary: position_ids must be on", lambda: rotary(x, pc, ps, position_ids=ids.to("meta"))),
        (ValueError, "rotary: offsets and cu_seqlens must be None with position_ids",
         lambda: rotary(x, pc, ps, position_ids=ids, offsets=1)),
        (ValueError, "rotary: offsets must have shape (2,), got (4,)", lambda: rotary(x, pc, ps, offsets=ids[0])),
        (ValueError, "rotary: cos must have 6 rows or more, got shape (5, 8)", lambda: rotary(x, pc, ps, offsets=2)),
        (ValueError, "rotary: offsets must be at least 0, got -1", lambda: rotary(x, pc, ps, offsets=-1)),
        (ValueError, "rotary: cu_seqlens must come with a packed x (T, H, D), got (2, 3, 4, 8)",
         lambda: rotary(x, pc, ps, cu_seqlens=ids[0])),
        (ValueError, "rotary: cu_seqlens must have shape (N + 1,), N at least 1, got (1,)",
         lambda: rotary(packed, pc, ps, cu_seqlens=ids[0, :1])),
        (ValueError, "rotary: mrope_section must go with position_ids or tables of all axes, not with offsets",
         lambda: rotary(x, pc, ps, offsets=0, mrope_section=[2, 2])),
        (ValueError, "qk_norm_rotary: q_weight must have shape (8,), got (7,)",
         lambda: qk_norm_rotary(x, x, c[0, 0, :7], None, c, s)),
        (ValueError, "qk_norm_rotary: eps must be at least 0, got -1",
         lambda: qk_norm_rotary(x, x, None, None, c, s, -1)),
        (ValueError, "qk_norm_rotary: casting must be one of",
         lambda: qk_norm_rotary(x, x, None, None, c, s, casting="none")),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_far_columns_of_tables(rotary, device, tmp_path):
    """Those from the eighth on begin past 2^31 elements."""
    x = tensor((1, 2, 4, 16), torch.bfloat16, device)
    near = tables((4, 16), torch.bfloat16, device)
    space = vast(2**32, device, tmp_path)
    far = [space.as_strided((4, 16), (1, 2**28), start).copy_(t) for t, start in zip(near, (0, 64))]
    assert torch.equal(rotary(x, *far), rotary(x, *near))


def test_opcheck(family, device):
    q, k = (t.requires_grad_() for t in (heads(2, 3, 4, 8, device=device), tensor((2, 2, 4, 8), device=device)))
    f32, (c, s) = torch.float32, tables((4, 6), device=device)
    w = tensor((8,), device=device).requires_grad_()
    rest = (False, False, 6, [], f32, f32)
    opcheck(family.rotary_fwd, (q, k, c, s, None, None, None, "bhtd", "bhtd", *rest))
    ids = torch.zeros(3, 1, 4, dtype=torch.int64, device=device)
    rest = (True, True, 6, [1, 1, 1], torch.float64, torch.float64)
    opcheck(family.rotary_fwd, (q, None, c, s, ids, None, None, "bhtd", "bhtd", *rest))
    ends = torch.tensor([0, 3], device=device)
    rest = (False, False, 6, [], f32, f32)
    opcheck(
        family.rotary_fwd,
        (k[0].detach(), None, c.clone().requires_grad_(), s, None, ends[:1], ends, "htd", "htd", *rest),
    )
    params = ("bhtd", "bhtd", False, 1e-6, 0.0)
    opcheck(family.qk_norm_rotary_fwd, (q, k, w, None, c, s, *params, True))
    dq, dk = torch.randn_like(q).requires_grad_(), torch.randn_like(k)
    opcheck(family.qk_norm_rotary_bwd, (dq, dk, q, k, w, w, c, s, *params, True, True))
    opcheck(family.qk_norm_rotary_bwd, (dq, None, q, None, None, None, c, s, *params, False, False))


def test_direct_launch_is_the_op(apply, qk_norm_rotary, family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    dtype = torch.bfloat16
    q, k = (tensor((2, h, 4, 24), dtype, device).requires_grad_() for h in (3, 1))
    w, (c, s) = tensor((24,), dtype, device).requires_grad_(), tables((1, 4, 16), dtype, device)
    op = family.rotary_fwd(q, k, c, s, None, None, None, "bhtd", "bhtd", False, False, 16, [], dtype, dtype)
    pairs = [(apply(q, k, c, s), op, (q, k))]
    op = family.qk_norm_rotary_fwd(q, k, w, w, c, s, "bhtd", "bhtd", False, 1e-6, 0.0, True)
    pairs.append((qk_norm_rotary(q, k, w, w, c, s, casting="llama"), op, (q, k, w)))
    for direct, op, inputs in pairs:
        assert all(map(torch.equal, direct, op))
        dy = [torch.randn_like(t) for t in op]
        assert all(map(torch.equal, *(torch.autograd.grad(y, inputs, dy) for y in (direct, op))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(rotary, apply, qk_norm_rotary, device, backend, dynamic):
    def step(q, k, w, cos, sin, ids):
        q, k = qk_norm_rotary(q.transpose(1, 2), k.transpose(1, 2), w, w, cos, sin)
        q, k = apply(q * 2, k, cos, sin)
        return (rotary(q, cos[0], sin[0], position_ids=ids, interleaved=True) ** 2).sum() + k.sin().sum()

    q, k, w = (tensor(s, device=device).requires_grad_() for s in ((2, 4, 3, 16), (2, 4, 2, 16), (16,)))
    cos, sin = tables((2, 4, 8), device=device)
    ids = torch.tensor([0, 3, 1, 1], device=device)
    expected = torch.autograd.grad(step(q, k, w, cos, sin, ids), (q, k, w))
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager" if dynamic else backend)
    for a, b in zip(torch.autograd.grad(compiled(q, k, w, cos, sin, ids), (q, k, w)), expected):
        assert_close(a, b.double(), dim=None)
    if not dynamic:
        with pytest.raises(ValueError, match="sin must have shape"):
            torch.compile(lambda q: apply(q, q, cos, sin[:, :3]))(q.transpose(1, 2))


def test_derivatives(rotary, apply, qk_norm_rotary, device):
    q, k = (tensor((1, h, 1, 3), torch.float64, device).requires_grad_() for h in (2, 1))
    w = tensor((3,), torch.float64, device).requires_grad_()
    c, s = (t.requires_grad_() for t in tables((1, 1, 2), torch.float64, device))

    def normed(q, w):
        return qk_norm_rotary(q, None, w, None, c.detach(), s.detach(), offset=0.5)[0]

    assert gradcheck(apply, (q, k, c, s)) and gradgradcheck(rotary, (k, c, s))
    inputs = (q, k, c.detach(), s.detach())
    assert gradgradcheck(apply, inputs)
    assert gradcheck(normed, (q, w)) and gradgradcheck(normed, (q, w))
    some = (k.detach(), None, w.detach(), None, c, s.detach())  # one table alone
    assert gradcheck(lambda *t: qk_norm_rotary(*t)[0], some)


def test_transforms(rotary, qk_norm_rotary, family, device):
    x, (c, s) = tensor((3, 2, 2, 4), torch.float64, device), tables((2, 4), torch.float64, device)
    w = tensor((4,), torch.float64, device)

    def norm(function):
        return lambda x: function(x, None, w, None, c[None], s[None])[0]

    for ours, reference in (
        (lambda x: rotary(x, c, s), lambda x: family.rotary_reference(x, c, s)),
        (norm(qk_norm_rotary), norm(family.qk_norm_rotary_reference)),
    ):
        grad, expected = (torch.func.grad(lambda x: f(x).sin().sum()) for f in (ours, reference))  # noqa: B023
        assert_close(grad(x), expected(x))
        batch = torch.stack((x, 2 * x), 1)
        assert_close(torch.func.vmap(grad, 1, 1)(batch), torch.func.vmap(expected, 1, 1)(batch))
        assert torch.equal(torch.func.vmap(ours, 1, 1)(batch)[:, 1], ours(2 * x))
        assert torch.func.jacrev(ours)(x[:1]).shape == (1, 2, 2, 4) * 2
    table_grad, expected = (
        torch.func.grad(lambda c: f(x, c, s).sin().sum())  # noqa: B023
        for f in (rotary, family.rotary_reference)
    )
    assert_close(table_grad(c), expected(c))


def test_forward_mode_is_refused_not_lost(rotary, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x, (c, s) = tensor((1, 2, 3, 4), device=device), tables((3, 4), device=device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: rotary(x, c, s), (x,), (x,))


def test_repeats_are_equal(qk_norm_rotary, device):
    q, k = (heads(2, h, 16, 32, torch.bfloat16, device).requires_grad_() for h in (4, 2))
    w, (c, s) = tensor((32,), torch.bfloat16, device).requires_grad_(), tables((2, 16, 32), device=device)
    runs = [torch.autograd.grad(sum(t.sum() for t in qk_norm_rotary(q, k, w, w, c, s)), (q, k, w)) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


def test_graph_capture(rotary, qk_norm_rotary, device):
    if device.type != "cuda":
        pytest.skip("no CUDA graphs here")
    x, (c, s) = heads(2, 3, 1, 8, device=device), tables((9, 8), device=device)
    offsets = torch.tensor([2, 5], device=device)

    def step():
        q, k = qk_norm_rotary(x, x[:, :1], None, None, c[None, :1], s[None, :1])
        return rotary(q, c, s, offsets=offsets), k

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    offsets += 3
    graph.replay()
    assert all(map(torch.equal, captured, step()))
