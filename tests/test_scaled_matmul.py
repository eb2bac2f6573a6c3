import itertools

import pytest
import torch
from _inputs import LAYOUTS, tensor, vast
from _numerics import DTYPES, assert_close, opcheck

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
E4M3, E5M2 = FP8[:2]
SCALINGS = {
    "tensor": {},
    "row": {"scaling": "row"},
    "block": {"scaling": "block"},
    "square": {"scaling": "block", "block": (128, 128)},
}


@pytest.fixture(scope="module")
def family(internals):
    return internals("scaled_matmul")


def same(a, b):
    """Equal values, NaN in the same places."""
    a, b = a.cpu().double(), b.cpu().double()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def spread(scale, shape, scaling):
    """A scale for every element."""
    scale = scale.double()
    if scaling in ("block", "square"):
        scale = scale.repeat_interleave(128, -1)[..., : shape[-1]]
    if scaling == "square":
        scale = scale.repeat_interleave(128, -2)[..., : shape[-2], :]
    return scale.expand(shape)


def hold(out, oracle, types=(E4M3, E4M3), slack=0.0):
    """assert_close, but for what Hopper's tensor cores do to float8: within 128 of K their sums have about 14 bits.

    torch._scaled_mm's do too: both are 1.3e-4 of the norm off, H200.
    """
    hopper = out.device.type == "cuda" and torch.cuda.get_device_capability(out.device) == (9, 0)
    rough = (
        hopper and out.dtype == torch.float32 and not any(torch.finfo(t).max == 240 or "fnuz" in str(t) for t in types)
    )
    assert_close(out, oracle, ulps=2**13 if rough else None, slack=slack)


def codes(dtype):
    """The finite values of a type, in order."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return values[values.isfinite()].sort().values


# Values of the four types: PyTorch's conversions on the CPU are the measure.


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", FP8)
def test_every_code_is_decoded(kernel, device, dtype):
    """a is every code, b a one: the product is a's value, in float32."""
    a = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(256, 1)
    one = torch.ones(1, 1).to(dtype)
    scale = torch.ones((), device=device)
    out = kernel.scaled_matmul(a.to(device), one.to(device), scale, scale, out_dtype=torch.float32)
    finite = a.float().isfinite()
    assert same(out.cpu()[finite], a.float()[finite]) and out.cpu()[a.float().isnan()].isnan().all()
    assert same(out.cpu()[a.float().isinf()], a.float()[a.float().isinf()])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", FP8)
def test_rounding(kernel, device, dtype):
    """Every code, the midpoints of all neighbours and the float32 values beside those, at a scale of one."""
    values, top = codes(dtype), torch.finfo(dtype).max
    middles = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (-1e9, 1e9)]
    tiny = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45, top, -top])
    x = torch.cat([values, middles, *beside, tiny])[None].clamp(-top, top)
    for scaling in ("tensor", "row"):
        q, scale = kernel.quantize_fp8(x.to(device), dtype, scaling)
        assert scale.item() == 1
        assert torch.equal(q.cpu().view(torch.uint8), x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_saturates_and_keeps_nan(kernel, device, dtype, scaling):
    top, inf = torch.finfo(dtype).max, float("inf")
    x = torch.tensor([[1.0, -2.0, inf, -inf, float("nan"), 0.0]], device=device)
    q, scale = kernel.quantize_fp8(x, dtype, **SCALINGS[scaling])
    assert_close(scale.flatten(), torch.tensor([2.0 / top]).double(), ulps=1)
    assert q.float()[0, 1:4].tolist() == [-top, top, -top]
    assert q.float().isnan().tolist() == [[False, False, False, False, True, False]] and q.float()[0, 5] == 0


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_and_extremes(kernel, device, scaling):
    options = SCALINGS[scaling]
    q, scale = kernel.quantize_fp8(torch.zeros(3, 5, device=device), **options)
    assert (scale == 1).all() and (q.float() == 0).all()
    for size in (1e-45, 1e-38, 3.4e38):  # subnormal, and nearly the largest
        x = torch.full((2, 3), size, device=device)
        q, scale = kernel.quantize_fp8(x, **options)
        assert scale.isfinite().all() and (scale >= 2**-126).all() and q.float().isfinite().all()
        error = (q.double() * spread(scale, x.shape, scaling) - size).abs()
        assert (error <= 2**-4 * size + 2**-136).all()
    q, scale = kernel.quantize_fp8(torch.full((2, 3), 1e300, dtype=torch.float64, device=device), **options)
    assert (scale == torch.finfo(torch.float32).max).all() and (q.float() == 448).all()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantize_is_the_reference(kernel, family, device, dtype, scaling):
    """Bit for bit, and near x."""
    for shape, x_dtype in zip(((5, 300), (2, 3, 129), (130, 7), (1, 1)), DTYPES):
        x = tensor(shape, x_dtype, device, scale=3.0)
        q, scale = kernel.quantize_fp8(x, dtype, **SCALINGS[scaling])
        r, expected = family.quantize_fp8_reference(x.cpu(), dtype, **SCALINGS[scaling])
        assert q.dtype == dtype and q.is_contiguous() and scale.dtype == torch.float32
        assert same(q, r) and torch.equal(scale.cpu(), expected)
        restored = q.double() * spread(scale, shape, scaling)
        steps = 2.0 ** -(4 if dtype in (FP8[0], FP8[2]) else 3)
        smallest = spread(scale, shape, scaling) * float(codes(dtype)[codes(dtype) > 0].min())
        assert ((restored - x.double()).abs() <= steps * x.double().abs() * (1 + 1e-6) + smallest).all()


def test_reference_scales_are_the_formula(family):
    x = tensor((3, 256), torch.float32)
    _, scale = family.quantize_fp8_reference(x)
    assert scale.shape == () and scale == x.abs().max() / 448
    _, scale = family.quantize_fp8_reference(x, E5M2, "row")
    assert torch.equal(scale, x.abs().amax(1, keepdim=True) / 57344)
    _, scale = family.quantize_fp8_reference(x, E4M3, "block")
    assert torch.equal(scale, x.view(3, 2, 128).abs().amax(2) / 448)
    x = tensor((200, 130), torch.float32)
    _, scale = family.quantize_fp8_reference(x, E4M3, "block", block=(128, 128))
    corners = [[x[:128, :128], x[:128, 128:]], [x[128:, :128], x[128:, 128:]]]
    assert torch.equal(scale, torch.stack([torch.stack([c.abs().max() / 448 for c in row]) for row in corners]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantize_strides(kernel, family, device, layout, scaling):
    for shape in ((6, 150), (2, 3, 4, 36)):
        x = tensor(shape, torch.bfloat16, device, layout)
        before = x.clone()
        q, scale = kernel.quantize_fp8(x, **SCALINGS[scaling])
        r, expected = family.quantize_fp8_reference(x.cpu(), **SCALINGS[scaling])
        assert same(q, r) and torch.equal(scale.cpu(), expected) and q.is_contiguous() and scale.is_contiguous()
        assert torch.equal(x, before)


def test_quantize_dimensions_that_do_not_join(kernel, device):
    x = tensor((4, 3, 2, 40), torch.float32, device)
    for scaling in ("tensor", "row", "block"):
        for a, b in zip(kernel.quantize_fp8(x.permute(2, 1, 0, 3), **SCALINGS[scaling]),
                        kernel.quantize_fp8(x.permute(2, 1, 0, 3).contiguous(), **SCALINGS[scaling])):  # fmt: skip
            assert same(a, b)


def test_quantize_far_columns(kernel, device, tmp_path):
    """The third column begins past 2^31 elements."""
    x = torch.as_strided(vast(3 * 2**30 + 2, device, tmp_path), (2, 4), (1, 2**30))
    x.copy_(tensor((2, 4), torch.bfloat16, device))
    for a, b in zip(kernel.quantize_fp8(x, scaling="row"), kernel.quantize_fp8(x.contiguous(), scaling="row")):
        assert same(a, b)


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 65537, 262144])
def test_quantize_widths(kernel, family, device, N):
    x = tensor((2, N), torch.float32, device)
    for scaling in SCALINGS:
        if N > 1000 and scaling in ("block", "square") and device.type == "cpu":
            continue  # thousands of programs
        q, scale = kernel.quantize_fp8(x, **SCALINGS[scaling])
        r, expected = family.quantize_fp8_reference(x.cpu(), **SCALINGS[scaling])
        assert same(q, r) and torch.equal(scale.cpu(), expected)


def test_quantize_empty_and_small_ranks(kernel, device):
    shapes = {"tensor": (), "row": (0, 1), "block": (0, 2), "square": (0, 2)}
    for scaling, shape in shapes.items():
        q, scale = kernel.quantize_fp8(torch.zeros(0, 200, device=device), **SCALINGS[scaling])
        assert q.shape == (0, 200) and scale.shape == shape
    q, scale = kernel.quantize_fp8(torch.zeros(3, 0, device=device), scaling="row")
    assert q.shape == (3, 0) and scale.shape == (3, 1) and (scale == 1).all()
    q, scale = kernel.quantize_fp8(torch.tensor(2.0, device=device))
    assert q.float() == 448 and scale.shape == ()
    for scaling in ("row", "block"):
        q, scale = kernel.quantize_fp8(torch.ones(5, device=device), scaling=scaling)
        assert q.shape == (5,) and scale.shape == (1,)


# Products.


def scales(operand, kind, device):
    """Scales of a kind for an operand of (rows, K)."""
    rows, K = operand.shape
    blocks = -(-K // 128)
    shape = {"tensor": (), "row": (rows, 1), "block": (rows, blocks), "square": (-(-rows // 128), blocks)}[kind]
    return (torch.rand(shape) + 0.5).to(device)


def product(family, a, b, scale_a, scale_b, bias, kind_a, kind_b):
    """In float64, by a way of its own."""
    wide_a = a.cpu().double() * spread(scale_a.cpu(), a.shape, kind_a)
    wide_b = b.cpu().double() * spread(scale_b.cpu(), b.shape, kind_b)
    out = wide_a @ wide_b.t()
    return out if bias is None else out + bias.cpu().double()


def multiply(kernel, a, b, scale_a, scale_b, *rest, **options):
    """b and its scales as quantize_fp8 gives them for (N, K)."""
    return kernel.scaled_matmul(a, b.t(), scale_a, scale_b.t() if scale_b.dim() == 2 else scale_b, *rest, **options)


def operands(M, N, K, device, types=(E4M3, E4M3)):
    return [tensor(s, torch.float32).to(t).to(device) for s, t in zip(((M, K), (N, K)), types)]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind_a, kind_b", list(itertools.product(SCALINGS, SCALINGS)))
def test_scales(kernel, family, device, kind_a, kind_b):
    a, b = operands(37, 70, 200, device)
    scale_a, scale_b = scales(a, kind_a, device), scales(b, kind_b, device)
    bias = tensor((70,), torch.float32, device)
    out = multiply(kernel, a, b, scale_a, scale_b, bias, torch.float32)
    hold(out, product(family, a, b, scale_a, scale_b, bias, kind_a, kind_b))
    assert out.is_contiguous()


def test_scales_of_several_squares(kernel, family, device):
    a, b = operands(150, 140, 260, device)
    for kind_a, kind_b in (("block", "square"), ("square", "block"), ("square", "square")):
        scale_a, scale_b = scales(a, kind_a, device), scales(b, kind_b, device)
        out = multiply(kernel, a, b, scale_a, scale_b, None, torch.float32)
        hold(out, product(family, a, b, scale_a, scale_b, None, kind_a, kind_b))


@pytest.mark.parametrize("types", list(itertools.product(FP8, FP8)))
def test_types(kernel, family, device, types):
    a, b = operands(20, 40, 70, device, types)
    one = torch.ones((), device=device)
    out = multiply(kernel, a, b, one, one, out_dtype=torch.float32)
    hold(out, product(family, a, b, one, one, None, "tensor", "tensor"), types)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fast", [False, True])
def test_results(kernel, family, device, out_dtype, fast):
    """A bias of any dtype; with fast_accum the tensor cores of one architecture keep 14 bits of a sum."""
    a, b = operands(64, 128, 256, device)
    scale_a, scale_b = scales(a, "row", device) / 8, scales(b, "row", device) / 8
    slack = 2.0**-10 * 4 if fast and device.type == "cuda" else 0.0
    for bias in (
        None,
        *(tensor((128,), d, device) for d in DTYPES),
        tensor((128,), out_dtype, device, "columns_sliced"),
    ):
        out = multiply(kernel, a, b, scale_a, scale_b, bias, out_dtype, fast_accum=fast)
        assert out.dtype == out_dtype
        hold(out, product(family, a, b, scale_a, scale_b, bias, "row", "row"), slack=slack)


@pytest.mark.parametrize("M, N, K", [(1, 64, 128), (1, 1, 1), (17, 3, 129), (3, 33, 31), (64, 96, 512), (129, 65, 64)])
def test_sizes(kernel, family, device, M, N, K):
    a, b = operands(M, N, K, device)
    for kinds in (("tensor", "tensor"), ("row", "row"), ("block", "square"), ("block", "block")):
        scale_a, scale_b = scales(a, kinds[0], device), scales(b, kinds[1], device)
        out = multiply(kernel, a, b, scale_a, scale_b, None, torch.float32)
        hold(out, product(family, a, b, scale_a, scale_b, None, *kinds))


@pytest.mark.parametrize("M, N, K", [(0, 4, 5), (4, 0, 5), (4, 5, 0), (0, 0, 0)])
def test_empty(kernel, device, M, N, K):
    a, b = operands(M, N, K, device)
    bias = tensor((N,), torch.float32, device)
    for kind in SCALINGS:
        out = multiply(kernel, a, b, scales(a, kind, device), scales(b, kind, device), bias, torch.float32)
        assert out.shape == (M, N) and torch.equal(out, bias.expand(M, N))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "rows_sliced", "columns_sliced", "expanded", "offset"])
def test_strides(kernel, family, device, layout):
    a, b = (tensor(s, torch.float32, "cpu", layout) for s in ((40, 200), (50, 200)))

    def cast(t):  # as t lies in memory
        return t.as_strided((t.untyped_storage().nbytes() // 4,), (1,), 0).to(E4M3).to(device).as_strided(
            t.shape, t.stride(), t.storage_offset()
        )  # fmt: skip

    a, b = cast(a), cast(b)
    scale_a = scales(a, "block", device).t().contiguous().t()
    scale_b = scales(b, "row", device).repeat(2, 1)[::2]
    out = multiply(kernel, a, b, scale_a, scale_b, None, torch.float32)
    hold(out, product(family, a, b, scale_a, scale_b, None, "block", "row"))


def test_far_scales(kernel, family, device, tmp_path):
    """Those of the third block begin past 2^31 elements."""
    a, b = operands(5, 7, 300, device, (E4M3, E4M3))
    scale_a, scale_b = scales(a, "block", device), scales(b, "block", device)
    space = vast(2**31 + 2**10, device, tmp_path, torch.float32)
    far_a = space.as_strided(scale_a.shape, (1, 2**30)).copy_(scale_a)
    far_b = space.as_strided(scale_b.shape, (1, 2**30), 2**9).copy_(scale_b)
    out = multiply(kernel, a, b, far_a, far_b, None, torch.float32)
    hold(out, product(family, a, b, scale_a, scale_b, None, "block", "block"))


def test_nan_and_inf(kernel, device):
    """Those in a row stay in that row, and nothing leaks in from beyond the edges."""
    a, b = operands(20, 30, 70, device, (E5M2, E4M3))
    a.view(torch.uint8)[3, 4], a.view(torch.uint8)[5, 69] = 0x7C, 0x7F  # inf, NaN
    b.view(torch.uint8)[7, 0] = 0x7F
    one = torch.ones((), device=device)
    expected = a.cpu().double() @ b.cpu().double().t()
    out = multiply(kernel, a, b, one, one, out_dtype=torch.float32)
    assert out.isnan().any() and out.isfinite().any()
    hold(out, expected, (E5M2, E4M3))
    padded = torch.full((24, 80), 0x7F, dtype=torch.uint8, device=device).view(E4M3)
    inside = padded[:20, :70]
    inside.view(torch.uint8).copy_(operands(20, 1, 70, device)[0].view(torch.uint8))
    assert multiply(kernel, inside, inside, one, one).isfinite().all()


def test_quantized_product_is_near(kernel, device):
    """What it is for: within the error of 4 bits of mantissa."""
    x, w = tensor((40, 256), torch.bfloat16, device), tensor((60, 256), torch.bfloat16, device)
    expected = x.double() @ w.double().t()
    for kind_x, kind_w in (("tensor", "tensor"), ("row", "row"), ("block", "square")):
        a, scale_a = kernel.quantize_fp8(x, **SCALINGS[kind_x])
        b, scale_b = kernel.quantize_fp8(w, **SCALINGS[kind_w])
        out = multiply(kernel, a, b, scale_a, scale_b)
        assert out.dtype == torch.bfloat16
        assert (out.double() - expected).norm() < 0.05 * expected.norm()


def test_is_torch(kernel, device):
    """torch._scaled_mm where it runs: the same scales mean the same."""
    a, b = operands(32, 64, 128, device)
    for kind in ("tensor", "row"):
        scale_a, scale_b = scales(a, kind, device), scales(b, kind, device).t()
        try:
            theirs = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(str(error).splitlines()[0])
        assert_close(kernel.scaled_matmul(a, b.t(), scale_a, scale_b), theirs.double(), ulps=3)


@pytest.mark.parametrize("kind_a, kind_b, subtiles", [("row", "tensor", 2), ("block", "square", 1)])
def test_descriptors(family, internals, device, on_kernels, kind_a, kind_b, subtiles):
    """The kernel whose programs walk tiles, more of them than programs, where no plan chooses it."""
    module, facts = internals("_scaled_matmul"), internals("_device").facts(device)
    native = module.multiplied_as(E4M3, E4M3, facts.arch) is None
    if not on_kernels or not (facts.descriptors and native or facts.arch == "interpreter"):
        pytest.skip("no descriptors on this device")
    plan = module.Plan("descriptor", 32, 64, 32, 4, 1, SUBTILES=subtiles)
    a, b = operands(1070, 272, 160, device) if device.type != "cpu" else operands(70, 144, 160, device)
    scale_a, scale_b = scales(a, kind_a, device), scales(b, kind_b, device)
    two = [t.reshape(1, 1) if t.dim() == 0 else t for t in (scale_a, scale_b)]
    out = module.scaled_matmul(a, b.t(), *two, None, torch.bfloat16, False, plan)
    hold(out, product(family, a, b, scale_a, scale_b, None, kind_a, kind_b), (E4M3, E4M3))


@pytest.mark.parametrize("tile", [(128, 256, 4), (256, 128, 4), (128, 128, 6), (128, 64, 6)])
def test_hopper(family, internals, device, tile):
    """The kernel for Hopper GPUs, with tails on every side and tiles that are walked: the formula, in the same bits."""
    module, facts = internals("_scaled_matmul"), internals("_device").facts(device)
    M, N, stages = tile
    plan = module.Plan("sm90", M, N, 128, 4, stages, 2)
    if not module.fits(plan, facts, E4M3, out_bytes=2, blocks=False):
        pytest.skip("not that device, or a Triton that its Gluon was not tested with")
    kinds = [("row", "row"), ("tensor", "tensor"), ("tensor", "row")]
    if max(M, N) <= 128:
        kinds = [*kinds[:2], ("block", "square"), ("block", "block"), ("square", "row")]
    shapes = itertools.cycle([(1000, 1040, 1168), (65, 72, 16), (2300, 2056, 272)])
    for (kind_a, kind_b), (m, n, k), out_dtype in zip(kinds, shapes, itertools.cycle((torch.bfloat16, torch.float16))):
        types = (E5M2, E4M3) if kind_b == "square" else (E4M3, E4M3)  # few: each takes seconds to compile
        a, b = operands(m, n, k, device, types)
        scale_a, scale_b = scales(a, kind_a, device) / 8, scales(b, kind_b, device) / 8
        bias = None if kind_a == "row" else tensor((n,), torch.float32, device, "columns_sliced")
        two = [t.reshape(1, 1) if t.dim() == 0 else t for t in (scale_a, scale_b)]
        runs = [module.scaled_matmul(a, b.t(), *two, bias, out_dtype, False, plan) for _ in range(20)]
        hold(runs[0], product(family, a, b, scale_a, scale_b, bias, kind_a, kind_b), types)
        assert all(torch.equal(r, runs[0]) for r in runs)
        a, b = (torch.where(t.float() < 0, -256.0, 256.0).to(t.dtype) for t in (a, b))  # sums past float16's largest
        scale_a, scale_b, *two = (s / 256 for s in (scale_a, scale_b, *two))
        out = module.scaled_matmul(a, b.t(), *two, bias, out_dtype, False, plan)
        hold(out, product(family, a, b, scale_a, scale_b, bias, kind_a, kind_b), types)


# How the ops behave.


def test_plans(internals):
    """A pure function: on a device it never saw, one that fits 64 KiB."""
    module, device = internals("_scaled_matmul"), internals("_device").Device
    unknown = device(100, 16, 65536, "another", "gfx1103")
    h200 = device(132, 32, 232448, "NVIDIA H200", "sm90", True, True)
    for M, N, K in itertools.product((1, 64, 65, 4096), (16, 4096), (16, 4096)):
        for fast, blocks, out_bytes in itertools.product((False, True), (False, True), (2, 4)):
            sizes = (E4M3, E4M3, M, N, K, fast, blocks)
            assert module.find_plan(unknown, *sizes, False, out_bytes).kind == "pointer"
            for describable, gluon in itertools.product((False, True), (False, True)):
                plan = module.find_plan(h200, *sizes, describable, out_bytes, gluon=gluon)
                assert plan.kind == "pointer" if not describable else plan.kind != "vendor"
                assert gluon or plan.kind != "sm90"
                assert plan.kind != "sm90" or out_bytes == 2
                assert not blocks or 128 % plan.BLOCK_K == 0
            plan = module.find_plan(h200, FP8[2], *sizes[1:], False, out_bytes)
            assert plan.kind == "pointer" and module.fits(plan, h200, E4M3, out_bytes=out_bytes, blocks=blocks)
    assert module.find_plan(h200, E4M3, E4M3, 1, 4096, 4096, False, False, True, vendor=True).kind == "vendor"
    assert (
        module.find_plan(h200, E4M3, E4M3, 4096, 4096, 4096, False, False, True, vendor=True, gluon=True).kind == "sm90"
    )


def test_native_types(internals):
    native = internals("_fp8").native
    ocp = {"sm89", "sm90", "sm100", "sm120", "gfx950", "gfx1201"}
    for arch in (*ocp, "sm75", "sm80", "gfx90a", "gfx942", "gfx1100", "xpu", "interpreter"):
        assert native(E4M3, arch) == native(E5M2, arch) == (arch in ocp)
        assert native(FP8[2], arch) == native(FP8[3], arch) == (arch == "gfx942")


def test_gradients_are_refused(kernel, device):
    x, w = tensor((4, 32), torch.float32, device).requires_grad_(), tensor((8, 32), torch.float32, device)
    a, scale_a = kernel.quantize_fp8(x)
    with pytest.raises(NotImplementedError, match="quantize_fp8: has no gradient"):
        (a.float() * scale_a).sum().backward()
    b, scale_b = kernel.quantize_fp8(w)
    out = multiply(kernel, a.detach(), b, scale_a.detach(), scale_b.requires_grad_())
    with pytest.raises(NotImplementedError, match="scaled_matmul: has no gradient"):
        out.sum().backward()


def test_opcheck(family, device):
    x = tensor((5, 130), torch.float32, device)
    for scaling in SCALINGS:
        opcheck(family.quantize_fp8_fwd, (x, E4M3, scaling))
    a, b = operands(5, 7, 130, device)
    for kind in ("tensor", "block"):
        args = (
            a,
            b.t(),
            scales(a, kind, device).reshape(1 if kind == "tensor" else 5, -1),
            scales(b, "row", device).t(),
        )
        opcheck(family.scaled_matmul_fwd, (*args, x[0, :7], torch.bfloat16, False))


def test_compile(kernel, device, backend):
    w, scale_w = kernel.quantize_fp8(tensor((16, 128), torch.float32, device), scaling="row")

    def step(x):
        q, scale = kernel.quantize_fp8(x * 2, scaling="row")
        return kernel.scaled_matmul(q, w.t(), scale, scale_w.t()) + 1

    x = tensor((8, 128), torch.float32, device)
    assert_close(torch.compile(step, fullgraph=True, backend=backend)(x), step(x).double())


def test_vmap(kernel, device):
    x = tensor((3, 4, 40), torch.float32, device)
    for scaling in SCALINGS:
        q, scale = torch.func.vmap(lambda t, s=scaling: kernel.quantize_fp8(t, **SCALINGS[s]))(x)
        for i in range(3):
            alone = kernel.quantize_fp8(x[i], **SCALINGS[scaling])
            assert same(q[i], alone[0]) and torch.equal(scale[i], alone[1])


def test_direct_launch_is_the_op(kernel, family, device):
    x = tensor((5, 300), torch.bfloat16, device)
    for scaling in SCALINGS:
        for direct, registered in zip(
            kernel.quantize_fp8(x, **SCALINGS[scaling]), family.quantize_fp8_fwd(x, E4M3, scaling)
        ):
            assert same(direct, registered)
    a, b = operands(20, 30, 128, device)
    scale_a, scale_b = scales(a, "row", device), scales(b, "row", device).t()
    registered = family.scaled_matmul_fwd(a, b.t(), scale_a, scale_b, None, torch.bfloat16, False)
    assert torch.equal(kernel.scaled_matmul(a, b.t(), scale_a, scale_b), registered)


def test_bad_input(kernel, device):
    x = tensor((4, 32), torch.float32, device)
    a, scale = kernel.quantize_fp8(x)
    b = a.t()
    cases = [
        (TypeError, "quantize_fp8: x must be a tensor, got list", lambda: kernel.quantize_fp8([1.0])),
        (TypeError, "quantize_fp8: x must have dtype", lambda: kernel.quantize_fp8(a)),
        (TypeError, "quantize_fp8: dtype must be float8_e4m3fn | float8_e5m2 | float8_e4m3fnuz | float8_e5m2fnuz, "
         "got int8", lambda: kernel.quantize_fp8(x, torch.int8)),
        (ValueError, "quantize_fp8: scaling must be one of 'tensor', 'row', 'block', got 'column'",
         lambda: kernel.quantize_fp8(x, scaling="column")),
        (ValueError, "quantize_fp8: block must be one of (1, 128), (128, 128), got (64, 64)",
         lambda: kernel.quantize_fp8(x, scaling="block", block=(64, 64))),
        (ValueError, "quantize_fp8: x must have at least 2 dimensions for this scaling, got 1",
         lambda: kernel.quantize_fp8(x[0], scaling="block", block=(128, 128))),
        (ValueError, "quantize_fp8: x must have at least 1 dimensions for this scaling, got 0",
         lambda: kernel.quantize_fp8(x[0, 0], scaling="row")),
        (TypeError, "scaled_matmul: a must be float8_e4m3fn | float8_e5m2 | float8_e4m3fnuz | float8_e5m2fnuz, "
         "got float32", lambda: kernel.scaled_matmul(x, b, scale, scale)),
        (TypeError, "scaled_matmul: scale_a must be a tensor, got NoneType",
         lambda: kernel.scaled_matmul(a, b, None, scale)),
        (TypeError, "scaled_matmul: scale_b must have dtype float32, got float64",
         lambda: kernel.scaled_matmul(a, b, scale, scale.double())),
        (ValueError, "scaled_matmul: a and b must have shapes (M, K) and (K, N), got (4, 32) and (4, 32)",
         lambda: kernel.scaled_matmul(a, a, scale, scale)),
        (ValueError, "scaled_matmul: scale_a must have one element or shape (4, 1), (4, 1) or (1, 1) for a (4, 32), "
         "got (4,)", lambda: kernel.scaled_matmul(a, b, scale.expand(4), scale)),
        (ValueError, "scaled_matmul: scale_b must have one element or shape (1, 4), (1, 4) or (1, 1) for b (32, 4), "
         "got (4, 1)", lambda: kernel.scaled_matmul(a, b, scale, scale.expand(4, 1))),
        (ValueError, "scaled_matmul: bias must have shape (4,), got (3,)",
         lambda: kernel.scaled_matmul(a, b, scale, scale, x[0, :3])),
        (TypeError, "scaled_matmul: out_dtype must be bfloat16 | float16 | float32, got torch.int8",
         lambda: kernel.scaled_matmul(a, b, scale, scale, out_dtype=torch.int8)),
        (TypeError, "scaled_matmul: fast_accum must be True or False, got 1",
         lambda: kernel.scaled_matmul(a, b, scale, scale, fast_accum=1)),
        (ValueError, "scaled_matmul: b must be on", lambda: kernel.scaled_matmul(a, b.to("meta"), scale, scale)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)
