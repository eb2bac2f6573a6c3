import pytest
import torch
from _inputs import LAYOUTS, few, tensor
from _numerics import DTYPES, assert_close, check, gradcheck, gradgradcheck, opcheck

# Shapes of a and b for G groups of T, and which dimension each result's sums run over.
FORMS = {
    "rows": lambda G, T, M, N, K: ((T, K), (G, K, N)),
    "columns": lambda G, T, M, N, K: ((G, M, K), (K, T)),
    "shares": lambda G, T, M, N, K: ((M, T), (T, N)),
    "batch": lambda G, T, M, N, K: ((G, M, K), (G, K, N)),
}
OFFS = [6, 6, 19, 21]  # an empty group, and T = 24 goes on


@pytest.fixture(scope="module")
def family(internals):
    return internals("grouped_mm")


def by_position(function, form, offs=None):
    """grouped_mm with the bias by position, so that it is differentiated."""
    offs = None if form == "batch" else offs
    return lambda a, b, bias=None, **kw: function(
        a, b, offs=None if offs is None else offs.to(a.device), bias=bias, **kw
    )


def operands(form, dtype, device, G=4, T=24, M=10, N=12, K=9, layout="contiguous"):
    return [tensor(s, dtype, device, layout) for s in FORMS[form](G, T, M, N, K)]


def hold(kernel, family, form, *tensors, offs=OFFS, **options):
    offs = torch.tensor(offs, dtype=torch.int32)
    return check(
        by_position(kernel.grouped_mm, form, offs), by_position(family.grouped_mm_reference, form, offs), *tensors,
        dim=None, **options,
    )  # fmt: skip


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("form", FORMS)
def test_reference_is_a_loop(family, form):
    a, b = operands(form, torch.float64, "cpu")
    ends, starts = OFFS, [0, *OFFS[:-1]]
    out = family.grouped_mm_reference(a, b, offs=None if form == "batch" else torch.tensor(OFFS))
    for g, (start, end) in enumerate(zip(starts, ends)):
        part = slice(start, end)
        if form == "rows":
            assert torch.equal(out[part], a[part] @ b[g])
        elif form == "columns":
            assert torch.equal(out[:, part], a[g] @ b[:, part])
        elif form == "shares":
            assert torch.equal(out[g], a[:, part] @ b[part])
        else:
            assert_close(out[g], a[g] @ b[g])
    if form == "rows":
        assert out.shape == (24, 12) and (out[21:] == 0).all()
    if form == "columns":
        assert out.shape == (10, 24) and (out[:, 21:] == 0).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_is_torch(kernel, device, dtype, form):
    """torch.nn.functional.grouped_mm, of sizes and dtypes that it has on every device of its own."""
    function = getattr(torch.nn.functional, "grouped_mm", None)
    if function is None:
        pytest.skip("this PyTorch has none")
    a, b = operands(form, dtype, "cpu", M=16, N=32, K=64, T=32)
    offs = None if form == "batch" else torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    theirs = function(a, b, offs=offs)
    ours = kernel.grouped_mm(a.to(device), b.to(device), offs=None if offs is None else offs.to(device))
    assert ours.dtype == theirs.dtype and ours.stride() == theirs.contiguous().stride()
    # Of float32 each adds in an order of its own, PyTorch in one that depends on the CPU: as far as both may be off.
    assert_close(ours, theirs.double(), ulps=32 if dtype == torch.float32 else 3)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_matches_reference(kernel, family, device, dtype, form):
    a, b = operands(form, dtype, device)
    (out,) = hold(kernel, family, form, a, b)
    assert out.is_contiguous() and out.dtype == dtype
    if form != "columns":
        for shape in ((12,), (4, 12)):
            hold(kernel, family, form, a, b, tensor(shape, dtype, device))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "G, T, M, N, K", [(1, 1, 1, 1, 1), (3, 40, 17, 33, 70), (2, 70, 64, 40, 31), (5, 33, 3, 129, 64)]
)
def test_sizes(kernel, family, device, form, G, T, M, N, K):
    offs = sorted(torch.randint(0, T + 1, (G,)).tolist()[:-1] + [T])
    for dtype in (torch.float32, torch.bfloat16):
        a, b = operands(form, dtype, device, G, T, M, N, K)
        hold(kernel, family, form, a, b, offs=offs)


@pytest.mark.parametrize("form", ["rows", "columns", "shares"])
@pytest.mark.parametrize(
    "offs",
    [[0, 0, 0, 0], [24, 24, 24, 24], [0, 0, 0, 24], [1, 2, 3, 4], [0, 24, 24, 24], [5, 30, 40, 50], [16, 20, 22, 23]],
)
def test_groups(kernel, family, device, form, offs):
    """Empty ones at either end, all rows in one, ends that lie past the rows."""
    a, b = operands(form, torch.float32, device)
    hold(kernel, family, form, a, b, offs=offs)


def test_long_sums_in_float32(kernel, device):
    """Of tiles, added up: one chain of 4096 additions is 9.6 ulps off on an H200, and this 1.9."""
    a, b = tensor((64, 4096), torch.float32, device), tensor((2, 4096, 64), torch.float32, device)
    found = kernel.grouped_mm(a, b, offs=torch.tensor([30, 64], dtype=torch.int32, device=device)).cpu().double()
    a, b = a.cpu().double(), b.cpu().double()
    exact = torch.cat([a[:30] @ b[0], a[30:] @ b[1]])
    assert (found - exact).norm() <= 5 * torch.finfo(torch.float32).eps * exact.norm()


def test_many_groups(kernel, family, device):
    """More of them than rows, and than are looked at together."""
    sizes = torch.randint(0, 3, (300,))
    offs = sizes.cumsum(0).tolist()
    a, b = operands("rows", torch.float32, device, G=300, T=offs[-1] + 3, N=5, K=4)
    hold(kernel, family, "rows", a, b, offs=offs)
    a, b = operands("shares", torch.float32, device, T=offs[-1], N=5, M=4)
    hold(kernel, family, "shares", a[:, :50], b[:50], offs=[v for v in offs if v <= 50][:8])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [{"T": 0}, {"M": 0}, {"N": 0}, {"K": 0}])
def test_empty(kernel, family, device, form, shape):
    a, b = operands(form, torch.float32, device, **shape)
    hold(kernel, family, form, a, b, offs=[min(v, shape.get("T", 24)) for v in OFFS])


@pytest.mark.parametrize("form", FORMS)
def test_no_groups(kernel, device, form):
    a, b = (t.requires_grad_() for t in operands(form, torch.float32, device, G=0))
    out = by_position(kernel.grouped_mm, form, torch.tensor([], dtype=torch.int32))(a, b)
    assert out.shape == {"rows": (24, 12), "columns": (10, 24)}.get(form, (0, 10, 12)) and (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (a, b)))


@pytest.mark.parametrize("layout", few(LAYOUTS))
@pytest.mark.parametrize("form", FORMS)
def test_strides(kernel, family, device, form, layout):
    a, b = operands(form, torch.float32, device, layout=layout)
    if form in ("rows", "batch"):
        bias = tensor((4, 12), torch.float32, device, layout)
        hold(kernel, family, form, a, b, bias)
    (out,) = hold(kernel, family, form, a, b)
    # Incoming gradients of every layout.
    hold(kernel, family, form, a, b, grads=[tensor(out.shape, torch.float32, device, layout)])


@pytest.mark.parametrize("form", FORMS)
def test_weights_as_layers_have_them(kernel, family, device, form):
    """(G, N, K) weights, transposed."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = operands(form, dtype, device, N=16, K=16, M=16)
        hold(kernel, family, form, a, b.mT.contiguous().mT)
        hold(kernel, family, form, a.mT.contiguous().mT, b)


@pytest.mark.parametrize("form", ["rows", "columns", "shares"])
def test_offs_of_int64_and_strided(kernel, device, form):
    a, b = operands(form, torch.float32, device)
    offs = torch.tensor(OFFS, dtype=torch.int32, device=device)
    expected = kernel.grouped_mm(a, b, offs=offs)
    assert torch.equal(kernel.grouped_mm(a, b, offs=offs.long()), expected)
    assert torch.equal(kernel.grouped_mm(a, b, offs=offs.repeat_interleave(2)[::2]), expected)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_out_dtype(kernel, family, device, out_dtype):
    for form in FORMS:
        a, b = operands(form, torch.bfloat16, device)
        offs = torch.tensor(OFFS)
        out = by_position(kernel.grouped_mm, form, offs)(a, b, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        exact = by_position(family.grouped_mm_reference, form, offs)(a.cpu().double(), b.cpu().double())
        assert_close(out, exact, ulps=16 * 2**29 if out_dtype == torch.float64 else None)  # sums are float32's
        a.requires_grad_()
        by_position(kernel.grouped_mm, form, offs)(a, b, out_dtype=out_dtype).sum().backward()
        assert a.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["rows", "columns", "shares"])
def test_groups_keep_to_themselves(kernel, device, form):
    """NaN and infinities of one group, and of what no group has, do not reach another."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = operands(form, dtype, device, T=40, M=16, N=16, K=16)
        offs = torch.tensor([5, 5, 21, 34], dtype=torch.int32, device=device)
        clean = kernel.grouped_mm(a, b, offs=offs)
        row, column = (a, None) if form == "rows" else (None, b) if form == "columns" else (a.t(), b.t())
        for t in (row, None if column is None else column.t()):
            if t is not None:
                t[5:21], t[34:] = float("nan"), float("inf")
        out = kernel.grouped_mm(a, b, offs=offs)
        if form == "rows":
            kept, same = out[[*range(5), *range(21, 40)]], clean[[*range(5), *range(21, 40)]]
        elif form == "columns":
            kept, same = out[:, [*range(5), *range(21, 40)]], clean[:, [*range(5), *range(21, 40)]]
        else:
            kept, same = out[[0, 1, 3]], clean[[0, 1, 3]]
        assert torch.equal(kept, same) and out.isnan().any()


def test_rows_of_no_group_have_no_gradient(kernel, device):
    a, b = (t.requires_grad_() for t in operands("rows", torch.float32, device))
    out = kernel.grouped_mm(a, b, offs=torch.tensor(OFFS, device=device))
    out.backward(torch.full_like(out, float("nan")).index_fill(0, torch.arange(21, device=device), 1.0))
    assert (a.grad[21:] == 0).all() and a.grad.isfinite().all() and b.grad.isfinite().all()
    assert (b.grad[1] == 0).all()  # the empty group's


def test_far_rows_of_no_group(kernel, device):
    if device.type == "cpu":
        pytest.skip("4 GiB of memory: on a GPU only")
    a, b = tensor((2**21 + 64, 16), torch.bfloat16, device), tensor((1, 16, 1024), torch.bfloat16, device)
    out = kernel.grouped_mm(a, b, offs=torch.tensor([32], dtype=torch.int32, device=device))
    assert out[:32].any() and not out[-64:].any()  # neither is NaN, as memory is before


def test_half_sums_are_wide(kernel, device):
    """In float16 they would stop at 2048, and overflow."""
    ones = torch.ones(8, 4096, dtype=torch.float16, device=device)
    out = kernel.grouped_mm(ones, ones.t().unsqueeze(0), offs=torch.tensor([8], device=device))
    assert (out == 4096).all()
    out = kernel.grouped_mm(ones, ones.t() * 8, offs=torch.tensor([2048, 4096], device=device))
    assert (out == 2048 * 8).all()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_precision(kernel, family, device, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        a, b = operands("rows", torch.float32, device, N=32, K=64)
        out = kernel.grouped_mm(a, b, offs=torch.tensor(OFFS, device=device))
        exact = family.grouped_mm_reference(a.cpu().double(), b.cpu().double(), offs=torch.tensor(OFFS))
        assert_close(out, exact, dim=None, ulps=16 if precision == "highest" else 2**14)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("form", ["rows", "shares"])
def test_bulk_copies(family, internals, device, on_kernels, form, turned):
    """Operands that lie either way, with groups that start at any place: copies in bulk start at 16 bytes."""
    module = internals("_grouped_mm")
    if not on_kernels or not (internals("_device").facts(device).descriptors or device.type == "cpu"):
        pytest.skip("no descriptors on this device")
    a, b = operands(form, torch.bfloat16, device, G=5, T=200, M=16, N=40, K=24)
    a, b = (t.mT.contiguous().mT if turn else t for t, turn in zip((a, b), turned))
    offs = torch.tensor([3, 3, 12, 77, 179], device=device)
    expected = family.grouped_mm_reference(a.cpu().double(), b.cpu().double(), offs=offs.cpu())
    (a if form == "rows" else b)[179:] = float("nan")
    out = torch.empty(expected.shape, dtype=a.dtype, device=device)
    plan = module.Plan("descriptor", 64, 64, 32, num_warps=4, num_stages=2, SUBTILES=2)
    (module.rows_in_groups if form == "rows" else module.shares_of_k)(a, b, offs, None, out, plan)
    assert_close(out, expected)


@pytest.mark.parametrize(
    "offs",
    [[3, 3, 12, 77, 179], [0, 0, 200, 200, 200], [0, 0, 0, 0, 0], [64, 128, 128, 190, 400], [190, 12, 64, 200, 3]],
)
def test_torchs_shares(family, internals, device, on_kernels, offs):
    """torch's product is told of groups as ours take them: within K, and never falling."""
    module = internals("_grouped_mm")
    if not on_kernels or not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("no kernels on this path, or no such product in this PyTorch")
    a, b = operands("shares", torch.bfloat16, device, T=200, M=256, N=264)
    a, out = a.mT.contiguous().mT, torch.empty(5, 256, 264, dtype=a.dtype, device=device)
    plan = module.Plan("vendor")
    found = module.shares_of_k(a, b, torch.tensor(offs, device=device), None, out, plan)
    if offs == sorted(offs):
        expected = family.grouped_mm_reference(a.cpu().double(), b.cpu().double(), offs=torch.tensor(offs))
        assert_close(found, expected)
        a.mT[: offs[0]] = float("nan")
        b[offs[-1] :] = float("nan")
        assert torch.equal(module.shares_of_k(a, b, torch.tensor(offs, device=device), None, out, plan)[1:], found[1:])


# How the op behaves.


def test_plans(internals):
    """A pure function: on a device it never saw, one that fits 64 KiB."""
    module, device = internals("_grouped_mm"), internals("_device").Device
    unknown = device(100, 16, 65536, "another", "gfx1103")
    h200 = device(132, 32, 232448, "NVIDIA H200", "sm90", True, True)
    for dtype in DTYPES:
        for kind in ("rows", "shares"):
            for M in (1, 64, 4096):
                plan = module.find_plan(unknown, dtype, kind, M, 512, 512, False)
                assert plan.kind == "pointer" and module.fits(plan, unknown, dtype, groups=kind)
                for describable in (False, True):
                    plan = module.find_plan(h200, dtype, kind, M, 512, 512, describable)
                    assert describable or plan.kind == "pointer"


def test_describable(internals):
    """Which matrices can be copied in tiles, and which way round."""
    turned = internals("_grouped_mm")._turned
    t = torch.zeros(4, 16, 24, dtype=torch.bfloat16)
    assert turned(t) is False and turned(t.mT) is True and turned(t[0]) is False
    assert turned(t[:, 1:]) is False and turned(t[:, :, 1:]) is None  # 2 bytes off
    assert turned(torch.zeros(16, 23, dtype=torch.bfloat16)) is None and turned(t[..., ::2]) is None
    assert turned(t[:0]) is None and turned(t[:1].expand(4, 16, 24)) is None


def test_opcheck(family, device):
    for form in FORMS:
        a, b = (t.requires_grad_() for t in operands(form, torch.float32, device))
        offs = None if form == "batch" else torch.tensor(OFFS, dtype=torch.int32, device=device)
        bias = None if form == "columns" else tensor((4, 12), torch.float32, device).requires_grad_()
        opcheck(family.grouped_mm_fwd, (a, b, offs, bias, torch.float32))


def test_transforms(kernel, family, device):
    offs = torch.tensor([1, 1, 3], device=device)
    for form in few(FORMS):
        a, b = (t.requires_grad_() for t in operands(form, torch.float64, device, G=3, T=4, M=2, N=2, K=2))
        function = by_position(kernel.grouped_mm, form, offs)
        leaves = (a, b) if form == "columns" else (a, b, tensor((3, 2), torch.float64, device).requires_grad_())
        assert gradcheck(function, leaves)
        assert gradgradcheck(function, leaves)
    a, b = operands("rows", torch.float64, device, G=3, T=4, N=2, K=2)

    def loss(b, a, op=kernel.grouped_mm):
        return op(a, b, offs=offs).square().sum()

    expected = torch.stack([torch.func.grad(loss)(b, t) for t in (a, 2 * a)])
    assert_close(torch.func.vmap(torch.func.grad(loss), (None, 0))(b, torch.stack([a, 2 * a])), expected)
    assert torch.func.jacrev(lambda t: kernel.grouped_mm(t, b, offs=offs))(a).shape == (4, 2, 4, 2)


def test_compile(kernel, device, backend):
    def step(a, b, offs):
        return kernel.grouped_mm(a * 2, b, offs=offs).square().sum()

    a, b = (t.requires_grad_() for t in operands("rows", torch.float32, device))
    offs = torch.tensor(OFFS, device=device)
    expected = torch.autograd.grad(step(a, b, offs), (a, b))
    for x, y in zip(
        torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(a, b, offs), (a, b)), expected
    ):
        assert_close(x, y.double(), dim=None)


def test_direct_launch_is_the_op_and_repeats(kernel, family, device):
    a, b = operands("rows", torch.bfloat16, device, T=40)
    offs = torch.tensor(OFFS, dtype=torch.int32, device=device)
    registered = family.grouped_mm_fwd(a, b, offs, None, torch.bfloat16)
    a.requires_grad_(), b.requires_grad_()
    runs = [kernel.grouped_mm(a, b, offs=offs) for _ in range(3)]
    assert all(torch.equal(r, registered) for r in runs)
    grads = [torch.autograd.grad(r.float().square().sum(), (a, b)) for r in runs]
    assert all(torch.equal(x, y) for g in grads for x, y in zip(g, grads[0]))


def test_bad_input(kernel, device):
    a, b = operands("rows", torch.float32, device)
    offs = torch.tensor(OFFS, dtype=torch.int32, device=device)
    batch = tensor((4, 10, 9), torch.float32, device)
    columns = tensor((9, 24), torch.float32, device)
    cases = [
        (TypeError, "grouped_mm: a must be a tensor, got list", lambda: kernel.grouped_mm([1.0], b, offs=offs)),
        (TypeError, "grouped_mm: b must be a tensor, got NoneType", lambda: kernel.grouped_mm(a, None, offs=offs)),
        (TypeError, "grouped_mm: b must have dtype", lambda: kernel.grouped_mm(a, b.long(), offs=offs)),
        (TypeError, "grouped_mm: b must have a's dtype torch.float32, got torch.float16",
         lambda: kernel.grouped_mm(a, b.half(), offs=offs)),
        (ValueError, "grouped_mm: a and b must have 2 or 3 dimensions, got shapes (9,) and (4, 9, 12)",
         lambda: kernel.grouped_mm(a[0], b, offs=offs)),
        (ValueError, "grouped_mm: a's columns must be as many as b's rows, got shapes (24, 8) and (4, 9, 12)",
         lambda: kernel.grouped_mm(a[:, :8], b, offs=offs)),
        (ValueError, "grouped_mm: offs must be None where a and b are 3-D, got a Tensor",
         lambda: kernel.grouped_mm(batch, b, offs=offs)),
        (ValueError, "grouped_mm: a and b must have as many groups, got shapes (4, 10, 9) and (3, 9, 12)",
         lambda: kernel.grouped_mm(batch, b[:3])),
        (TypeError, "grouped_mm: offs must be a tensor where a or b is 2-D, got NoneType",
         lambda: kernel.grouped_mm(a, b)),
        (TypeError, "grouped_mm: offs must have dtype int32 | int64, got float32",
         lambda: kernel.grouped_mm(a, b, offs=offs.float())),
        (ValueError, "grouped_mm: offs must have shape (4,), got (3,)",
         lambda: kernel.grouped_mm(a, b, offs=offs[:3])),
        (ValueError, "grouped_mm: offs must be on", lambda: kernel.grouped_mm(a, b, offs=offs.to("meta"))),
        (ValueError, "grouped_mm: bias must have shape (12,) or (4, 12), got (4,)",
         lambda: kernel.grouped_mm(a, b, offs=offs, bias=a[0, :4])),
        (NotImplementedError, "grouped_mm: bias of a result with groups of columns; add it to the result",
         lambda: kernel.grouped_mm(batch, columns, offs=offs, bias=a[0])),
        (TypeError, "grouped_mm: out_dtype must be a floating dtype or None, got torch.int8",
         lambda: kernel.grouped_mm(a, b, offs=offs, out_dtype=torch.int8)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_offsets_that_fall_stay_in_memory(kernel, device, on_kernels):
    """They are the caller's mistake, which only the device could see: the result means nothing, and that is all."""
    if not on_kernels:
        pytest.skip("PyTorch's sizes raise")
    a, b = torch.randn(300, 16, device=device), torch.randn(9, 16, 8, device=device)
    offs = torch.tensor([300, 0, 300, 0, 300, 0, 300, 0, 300], device=device)
    assert kernel.grouped_mm(a, b, offs=offs).shape == (300, 8)


def test_meta_tensors_have_shapes(kernel):
    a, b, offs = (torch.empty(s, device="meta") for s in ((7, 16), (2, 16, 8), (2,)))
    out = kernel.grouped_mm(a, b, offs=offs.int())
    assert out.is_meta and out.shape == (7, 8)
