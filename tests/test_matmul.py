import json

import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, tensor, vast
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def family(internals):
    return internals("matmul")


@pytest.fixture(scope="module")
def core(internals):
    return internals("_matmul")


def rounding(dtype, terms):
    """What the gradients of rounded products may be off by, where terms of a size of about 1 are summed and cancel."""
    return 2 * torch.finfo(dtype).eps * terms**0.5


@pytest.fixture
def hold(family):
    """Results and gradients of a function of the family against its reference."""

    def hold(name, *tensors, terms=None, **options):
        slack = 0.0 if terms is None else rounding(tensors[0].dtype, terms)
        function, reference = getattr(family, name), getattr(family, f"{name}_reference")
        return check(function, reference, *tensors, dim=None, slack=slack, **options)[0]

    return hold


def linear_of(family, **options):
    """linear and its reference as functions of tensors alone: x, weight, bias, residual."""

    def of(function):
        return lambda x, w, b, r: function(x, w, b, residual=r, **options)

    return of(family.linear), of(family.linear_reference)


# The references first: they are the oracle of everything below.


def test_references_are_torchs(family):
    x, w, b, r = (tensor(s, torch.float64) for s in ((2, 3, 5), (4, 5), (4,), (2, 3, 4)))
    up, dy = tensor((4, 5), torch.float64), tensor((2, 3, 4), torch.float64)
    pairs = [
        (linear_of(family)[1], lambda x, w, b, r: F.linear(x, w, b) + r, (x, w, b, r)),
        (linear_of(family, activation="gelu")[1], lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (x, w, b, r)),
        (family.gated_linear_reference, lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u), (x, w, up)),
        (family.matmul_reference, torch.matmul, (x, w.mT)),
    ]
    for mine, theirs, tensors in pairs:
        (y,), grads = evaluate(mine, tensors, {}, [dy])
        (t,), expected = evaluate(theirs, tensors, {}, [dy])
        for a, b_ in zip((y, *grads), (t, *expected)):
            assert_close(a, b_, dim=None)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_matches_reference(family, device, dtype):
    x, w, b, r = (tensor(s, dtype, device) for s in ((2, 9, 40), (24, 40), (24,), (2, 9, 24)))
    w = (w.double() * 40**-0.5).to(dtype)
    for activation in (None, "gelu", "silu"):
        ours, reference = linear_of(family, activation=activation)
        for bias in (None, b):
            for residual in (None, r):
                y = check(ours, reference, x, w, bias, residual, dim=None, slack=rounding(dtype, 40))[0]
                assert y.dtype == dtype and y.is_contiguous()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear_matches_reference(hold, device, dtype):
    x, gate, up = (tensor(s, dtype, device, scale=c) for s, c in (((2, 9, 40), 1), ((24, 40), 0.16), ((24, 40), 0.16)))
    for activation in ("silu", "gelu_tanh"):
        hold("gated_linear", x, gate, up, terms=40, activation=activation)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "quick_gelu", "softplus", "tanh"])
def test_activations(family, device, activation):
    ours, reference = linear_of(family, activation=activation)
    check(ours, reference, *(tensor(s, device=device) for s in ((5, 8), (6, 8), (6,), (5, 6))), dim=None)


@pytest.mark.parametrize(
    "a, b",
    [
        ((5,), (5,)),
        ((5,), (5, 3)),
        ((4, 5), (5,)),
        ((2, 4, 5), (5,)),
        ((5,), (2, 5, 3)),
        ((2, 3, 4, 5), (5, 6)),
        ((4, 5), (3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((3, 4, 5), (1, 5, 6)),
        ((2, 1, 2, 4, 5), (3, 1, 5, 2)),
    ],
    ids=str,
)
def test_shapes_as_torch(hold, device, a, b):
    a, b = tensor(a, device=device), tensor(b, device=device)
    y = hold("matmul", a, b, terms=5)
    assert y.shape == torch.matmul(a, b).shape
    hold("matmul", a.bfloat16(), b.bfloat16(), terms=5)


@pytest.mark.parametrize(
    "M, N, K",
    [
        (1, 1, 1),
        (1, 40, 33),
        (4, 17, 129),
        (5, 3, 65),
        (33, 2, 70),
        (3, 5, 1),
        (65, 33, 100),
        (17, 130, 16),
        (2, 3, 2000),
    ],
)
def test_sizes(hold, device, M, N, K):
    for dtype in (torch.float32, torch.float16):
        hold("linear", tensor((M, K), dtype, device), tensor((N, K), dtype, device, scale=K**-0.5), terms=max(M, N))


@pytest.mark.parametrize("M, N, K", [(0, 4, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_empty(family, hold, device, M, N, K):
    ours, reference = linear_of(family, activation="gelu")
    check(ours, reference, *(tensor(s, device=device) for s in ((M, K), (N, K), (N,), (M, N))), dim=None)
    hold("gated_linear", *(tensor(s, device=device) for s in ((M, K), (N, K), (N, K))))
    hold("matmul", tensor((0, M, K), device=device), tensor((K, N), device=device))
    assert family.linear(tensor((2, M, K), device=device), tensor((N, K), device=device)).shape == (2, M, N)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(hold, device, layout):
    plain = tensor((6, 24), device=device), tensor((16, 24), device=device), tensor((6, 16), device=device)
    laid = [tensor(t.shape, device=device, layout=layout) for t in plain]
    hold("linear", laid[0], plain[1], terms=24)
    hold("linear", plain[0], laid[1], terms=24)
    hold("linear", *laid[:2], terms=24, grads=[laid[2]], bias=tensor((32,), device=device)[::2])
    hold("linear", *plain[:2], terms=24, residual=laid[2])
    hold("gated_linear", laid[0], laid[1], plain[1], terms=24)
    a, b = tensor((2, 3, 8, 5), device=device, layout=layout), tensor((2, 3, 5, 9), device=device, layout=layout)
    hold("matmul", a, b, terms=8)
    hold("matmul", a.transpose(1, 2)[:, :, :2], b[:, :2].mT[..., None, :, :].squeeze(2).mT[:, :1], terms=8)


PLANS = {
    "pointers": {"kind": "pointers", "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 2},  # the last group has 1
    "pointers_split": {"kind": "pointers", "BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16, "SPLIT_K": 3, "GROUP_M": 2},
    "descriptors": {"kind": "descriptors", "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "SUBTILES": 2},
    "descriptors_whole": {"kind": "descriptors", "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "FLATTEN": False},
    "descriptors_split": {
        "kind": "descriptors", "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "SPLIT_K": 2, "SUBTILES": 4, "PER_SM": 2
    },
    "padded": {"kind": "descriptors", "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "PAD": True},
    "vendor": {"kind": "vendor"},
}  # fmt: skip


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", PLANS)
def test_every_kind_of_plan(core, internals, device, on_kernels, name, gated):
    """Tiles past every edge, operands both ways round, one and several matrices; results and saved products."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    plan = core.Plan(**PLANS[name])
    if plan.kind == "descriptors" and not (internals("_device").facts(device).descriptors or device.type == "cpu"):
        pytest.skip("no descriptors on this device")
    M, N, K = (72, 88, 40) if device.type != "cpu" or plan.BLOCK_M == 64 else (40, 40, 24)
    if plan.PAD:
        M, N, K = 71, 87, 41
    cases = [((), (False, True)), ((2,), (True, False)), ((), (True, True)), ((2,), (False, True))]
    for batch, turned in cases[: 2 if device.type == "cpu" else 4]:
        shapes = ((*batch, M, K), (*batch, K, N), (*batch, K, N) if gated else None)
        a, b, b2 = (s and tensor(s, torch.bfloat16, device, scale=0.3) for s in shapes)
        if turned[0]:
            a = a.mT.contiguous().mT
        if turned[1]:
            b, b2 = (t if t is None else t.mT.contiguous().mT for t in (b, b2))
        r, bias = tensor((*batch, M, N), torch.float32, device), tensor((N,), torch.float32, device)
        how = core.Product("silu", 1.0, 0.0, torch.bfloat16, save=True)
        y, z, z2 = core.product(a, b, b2, bias, r, how, plan)
        left, right = (a.double() @ t.double() for t in (b, b if b2 is None else b2))
        expected = F.silu(left + bias) * (right if gated else 1.0) + r
        # The vendor's products are rounded before the epilogue, as in eager torch.
        ulps = 6 if plan.kind == "vendor" else None
        assert_close(y, expected, dim=None, ulps=ulps)
        assert_close(z, left, dim=None)
        if gated:
            assert_close(z2, right, dim=None)
        wide = torch.float32 if plan.kind != "vendor" else None
        plain = core.product(a, b, None, None, None, core.Product(out_dtype=wide), plan)
        assert_close(plain[0], left, dim=None)
        assert plain[1:] == (None, None)
        if device.type != "cpu":
            assert torch.equal(core.product(a, b, b2, bias, r, how, plan)[0], y)


@pytest.mark.parametrize("M", [1, 3, 4])
def test_rows(core, device, on_kernels, M):
    """The plain reduction, along both layouts of the matrix, in shares of K, and turned for narrow matrices."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    for split in (1, 2):
        plan = core.Plan("rows", BLOCK_N=8, BLOCK_K=64, SPLIT_K=split)
        a, w, w2 = (tensor(s, torch.bfloat16, device, scale=0.3) for s in ((M, 130), (21, 130), (21, 130)))
        bias, r = tensor((21,), torch.float32, device), tensor((M, 21), torch.float32, device)
        left, right = a.double() @ w.double().T, a.double() @ w2.double().T
        how = core.Product("silu", 1.0, 0.0, torch.float32, save=True)
        for b, b2 in ((w.T, w2.T), (w.T.contiguous(), w2.T.contiguous())):
            y, z, z2 = core.product(a, b, b2, bias, r, how, plan)
            assert_close(y, F.silu(left + bias) * right + r, dim=None)
            assert_close(z, left, dim=None), assert_close(z2, right, dim=None)
        y, z, _ = core.product(w, a.T, None, bias[:M], r.T, how, plan)
        assert_close(y, F.silu(left.T + bias[:M]) + r.T, dim=None), assert_close(z, left.T, dim=None)


def devices(internals):
    Device = internals("_device").Device
    return {
        "H200": Device(132, 32, 232448, "NVIDIA H200", "sm90", True, True),
        "B200": Device(148, 32, 232448, "NVIDIA B200", "sm100", True, True),
        "A100": Device(108, 32, 166912, "NVIDIA A100-SXM4-80GB", "sm80", False, True),
        "T4": Device(40, 32, 65536, "Tesla T4", "sm75"),
        "MI300X": Device(304, 16, 65536, "AMD Instinct MI300X", "gfx942"),
        "PVC": Device(128, 32, 131072, "Intel(R) Data Center GPU Max 1550", "xpu"),
        "interpreter": Device(2, 32, 65536, "interpreter", "interpreter"),
    }


def asked(core, device, dtype, M, N, K, invariant=False, **options):
    ask = core.sizes(device, M, N, K, 1, options.get("gated", False))
    ask.update(act=False, aligned=K % 8 == 0, pads=True, turned=True, whole=N % 8 == 0, precision="ieee", vendor=True)
    return core.choose(device, dtype, invariant, **{**ask, "out_bytes": dtype.itemsize, **options})


def test_plans_fit_everywhere(core, internals):
    for device in devices(internals).values():
        for dtype in DTYPES:
            for sizes in (
                (1, 4096, 4096),
                (3, 1, 7),
                (16, 4096, 4096),
                (64, 64, 1),
                (200, 4096, 14336),
                (10**6, 1024, 512),
            ):
                for options in (
                    {},
                    {"aligned": False},
                    {"gated": True},
                    {"out_bytes": 4, "vendor": False},
                    {"turned": False},
                ):
                    for invariant in (False, True):
                        plan = asked(core, device, dtype, *sizes, invariant, **options)
                        assert plan == asked(core, device, dtype, *sizes, invariant, **options)
                        assert plan.kind != "descriptors" or device.descriptors
                        assert plan.kind != "vendor" or not (invariant or options.get("vendor") is False)
                        assert plan.kind != "rows" or min(sizes[:2]) <= 4 and not invariant
                        if plan.kind == "pointers":
                            sets = 2 if options.get("gated") else 1
                            tiles = (plan.BLOCK_M + sets * plan.BLOCK_N) * plan.BLOCK_K * plan.num_stages
                            assert tiles * dtype.itemsize <= device.shared_memory


def test_plans_of_the_invariant_table_do_not_ask_for_rows(core, internals):
    for device in devices(internals).values():
        plans = {asked(core, device, torch.bfloat16, M, 4096, 4096, True) for M in (1, 2, 16, 64, 1000, 10**6)}
        assert len(plans) == 1


@pytest.mark.parametrize("table", ["matmul", "matmul_invariant"])
def test_rows_of_the_tables_say_where_they_come_from(core, internals, table):
    rows = json.loads((internals("_tuning")._CONFIGS / f"{table}.json").read_text())
    for row in rows:
        assert set(row) <= {"when", "plan", "measured", "reasoned"} and ("measured" in row) != ("reasoned" in row)
        plan = core.Plan(**row["plan"])
        assert plan.kind in ("rows", "pointers", "descriptors", "vendor") and plan.SUBTILES in (1, 2, 4)
        assert all(b & (b - 1) == 0 and b > 0 for b in (plan.BLOCK_N, plan.BLOCK_K)) and plan.SPLIT_K >= 1
        assert table != "matmul_invariant" or plan.kind not in ("vendor", "rows")


def test_plans_that_do_not_fit_after_all(core, internals, monkeypatch):
    """What the compiler refuses is not tried again, and the next plan serves; one that was asked for raises."""
    tuning, device = internals("_tuning"), devices(internals)["H200"]
    monkeypatch.setattr(tuning, "_refused", {})
    refused = internals("_triton").OutOfResources(2, 1, "shared memory")
    tried, limit = [], 2

    @tuning.falls_back
    def launch(x, plan=None):
        tried.append(plan or asked(core, device, torch.bfloat16, 4096, 4096, 4096))
        if len(set(tried)) <= limit:
            raise refused
        return x, tried[-1]

    x, plan = launch("x")
    assert x == "x" and len(tried) == 3 and plan == tried[2] == asked(core, device, torch.bfloat16, 4096, 4096, 4096)
    limit = 10**6
    with pytest.raises(type(refused)):
        launch("x", plan)
    with pytest.raises(type(refused)):
        launch("x", plan=plan)
    with pytest.raises(LookupError, match="no plan that fits"):
        launch("x")  # none is left


def test_lookup(internals, monkeypatch):
    """Exact device, then architecture, then the rest; ranges with open ends; what does not fit is passed over."""
    tuning, device = internals("_tuning"), devices(internals)["H200"]
    rows = [
        {"when": {"M": [None, 8]}, "plan": {"kind": "few"}},
        {"when": {"arch": ["sm90", "sm100"], "M": [9, None]}, "plan": {"kind": "arch"}},
        {"when": {"device": "NVIDIA H200", "dtype": ["float16"]}, "plan": {"kind": "device"}},
        {"when": {}, "plan": {"kind": "rest"}},
    ]
    tables = {"t": sorted(rows, key=lambda r: 0 if "device" in r["when"] else 1 if "arch" in r["when"] else 2)}
    monkeypatch.setattr(tuning, "_rows", tables.__getitem__)
    Plan = internals("_matmul").Plan

    def find(dtype=torch.bfloat16, device=device, refused=(), **sizes):
        fits = lambda plan, *_, **__: plan.kind not in refused  # noqa: E731
        return tuning.find("t", Plan, fits, device, dtype, **sizes).kind

    assert find(torch.float16, M=1) == "device" and find(M=8) == "few" and find(M=9) == "arch"
    assert find(M=9, refused=("arch",)) == "rest" and find(M=9, device=devices(internals)["T4"]) == "rest"
    with pytest.raises(LookupError, match="configs/t.json has no plan that fits"):
        find(M=9, refused=("arch", "rest"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariance(family, device, on_kernels, monkeypatch, dtype):
    """The bits of a row, alone and among 63 others."""
    if not on_kernels:
        pytest.skip("torch's products have no such option")
    if device.type == "cpu":  # the interpreter's products are numpy's, whose bits depend on a row's place in its tile
        monkeypatch.setattr("numpy.matmul", lambda a, b, dtype: (a[..., None] * b[..., None, :, :]).sum(-2, dtype))
    x, w, up = (tensor(s, dtype, device) for s in ((64, 200), (50, 200), (50, 200)))
    for function in (
        lambda x: family.linear(x, w, activation="gelu", batch_invariant=True),
        lambda x: family.gated_linear(x, w, up, batch_invariant=True),
        lambda x: family.matmul(x, w.t().contiguous(), batch_invariant=True),
    ):
        full = function(x)
        for rows in (slice(5, 6), slice(3, 36), slice(63, 64)):
            assert torch.equal(function(x[rows]), full[rows])


def test_invariance_by_environment(family, core, device, on_kernels, monkeypatch):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    seen = []
    choose = core.choose
    monkeypatch.setattr(core, "choose", lambda *a, **k: seen.append(a[2]) or choose(*a, **k))
    x = tensor((8, 16), device=device)
    family.linear(x, x)
    monkeypatch.setattr(family, "_INVARIANT", True)
    family.linear(x[:4], x), family.gated_linear(x, x, x)  # not the kind of call that was: it would be repeated
    assert seen == [False, True, True]


def test_precision(family, internals, device, on_kernels):
    """IEEE unless torch is told otherwise, or the call is."""
    x, w = tensor((32, 1024), device=device), tensor((16, 1024), device=device)
    oracle = x.double() @ w.double().T
    ieee = 64  # ulps: 1024 terms, which a vendor's library adds up one after the other
    tf32 = 2**14  # it has 10 bits: Hopper drops the rest, up to 2^-10 of each operand and 2^-9 of a product
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert_close(family.linear(x, w, precision="ieee"), oracle, dim=None, ulps=ieee)
        fast = family.linear(x, w)
        torch.set_float32_matmul_precision("highest")
        assert_close(family.linear(x, w), oracle, dim=None, ulps=ieee)
        assert_close(family.linear(x, w, precision="tf32"), oracle, dim=None, ulps=tf32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_close(fast, oracle, dim=None, ulps=tf32)
    if on_kernels and internals("_device").facts(device).tf32:
        assert (fast - oracle).abs().max() > 1e-3


def test_autocast(family, device):
    x, w, b = (tensor(s, device=device).requires_grad_() for s in ((6, 16), (8, 16), (8,)))
    with torch.autocast(device.type, torch.bfloat16):
        y, t = family.linear(x, w, b, activation="gelu"), F.gelu(F.linear(x, w, b))
        assert y.dtype == t.dtype == torch.bfloat16
        assert family.gated_linear(x, w, w).dtype == torch.bfloat16
        assert family.matmul(x, w.T.bfloat16()).dtype == torch.bfloat16
        assert family.linear(x, w, residual=t.float()).dtype == torch.float32
        assert family.linear(x.double(), w.double()).dtype == torch.float64
        wide = family.linear(x, w, out_dtype=torch.float32)
    assert_close(wide, x.bfloat16().double() @ w.bfloat16().double().T, dim=None)
    mine, theirs = (torch.autograd.grad(r.float().sum(), (x, w, b)) for r in (y, t))
    for a, e in zip(mine, theirs):
        assert a.dtype == torch.float32
        assert_close(a.bfloat16(), e.double(), dim=None, ulps=8)


def test_result_dtype(family, device):
    a, b = tensor((6, 16), torch.bfloat16, device), tensor((16, 8), torch.bfloat16, device)
    r = tensor((6, 8), torch.float32, device)
    assert_close(family.matmul(a, b, out_dtype=torch.float32), a.double() @ b.double(), dim=None)
    assert_close(family.matmul(a, b, residual=r), a.double() @ b.double() + r, dim=None)
    assert family.matmul(a, b, residual=r, out_dtype=torch.float16).dtype == torch.float16
    x = a.clone().requires_grad_()
    assert torch.autograd.grad(family.matmul(x, b, out_dtype=torch.float32).sum(), x)[0].dtype == torch.bfloat16


def test_special_values(family, device):
    """NaN and inf reach what torch's product lets them reach; padding of tiles brings none."""
    x, w = tensor((37, 50), device=device), tensor((21, 50), device=device)
    x[3, 1], x[5, 2], w[7, 0] = NAN, INF, NAN
    y, t = family.linear(x, w), x @ w.T
    assert torch.equal(y.isnan(), t.isnan()) and torch.equal(y.isinf(), t.isinf())
    y = family.linear(x, w, activation="relu")
    assert torch.equal(y.isnan(), t.isnan())
    big = torch.full((2, 64), 300.0, dtype=torch.float16, device=device)
    assert (
        family.linear(big, big).isinf().all() and (family.linear(big, big, out_dtype=torch.float32) == 64 * 9e4).all()
    )


def test_only_what_is_wanted(family, device):
    tensors = [tensor(s, device=device) for s in ((5, 6), (4, 6), (4,), (5, 4))]
    dy = tensor((5, 4), device=device)
    for activation in (None, "silu"):
        ours, _ = linear_of(family, activation=activation)
        _, everything = evaluate(ours, tensors, {}, [dy])
        for wanted in range(4):
            given = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
            (found,) = torch.autograd.grad(ours(*given), given[wanted], dy)
            assert_close(found, everything[wanted].double(), dim=None)
    weight = tensors[1].clone().requires_grad_()
    for loss in (
        family.gated_linear(tensors[0], weight, tensors[1]),
        family.gated_linear(tensors[0], tensors[1], weight),
    ):
        (dw,) = torch.autograd.grad(loss, weight, dy)
        assert dw.is_contiguous() and dw.shape == weight.shape


def test_beyond_32_bits(family, device):
    if device.type == "cpu":
        pytest.skip("8 GB of values")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    w = tensor((64, 64), torch.bfloat16, device)
    for a, b in ((x, w.T), (w, x.T), (x.T, w[:2])):
        assert_close(family.matmul(a, b), a.double() @ b.double())


def test_residual_of_far_rows(family, device, tmp_path):
    """Rows 2^25 elements apart: those from the 64th on begin past 2^31."""
    residual = torch.as_strided(vast(66 * 2**25, device, tmp_path), (66, 8), (2**25, 1))
    residual.copy_(torch.randn(66, 8))
    x, w = tensor((66, 16), torch.bfloat16, device), tensor((8, 16), torch.bfloat16, device)
    assert torch.equal(family.linear(x, w, residual=residual), family.linear(x, w, residual=residual.contiguous()))


@pytest.mark.parametrize("N", [24, 23])
@pytest.mark.parametrize("M", [70, 7])
def test_sum_of_products(core, device, on_kernels, M, N):
    """By the vendor's library, which takes the first product rounded, and by kernels that take it as it is."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [tensor(s, dtype, device, scale=0.3) for s in ((M, 16), (16, N), (M, 16), (16, N))]
        before = [t.clone() for t in tensors]
        a, b, a2, b2 = (t.double() for t in tensors)
        assert_close(core.sum_of_products(*tensors, "ieee"), a @ b + a2 @ b2, dim=None)
        assert all(torch.equal(t, was) for t, was in zip(tensors, before))


def test_vendors_take_32_bits(core):
    """Their libraries refuse larger sizes and steps, so that such products are never theirs."""

    assert core.vendor_takes(4, 4, 2**31 - 2) and not core.vendor_takes(4, 2**31, 4)


def test_graph_capture(family, device):
    if device.type != "cuda":
        pytest.skip("no graphs here")
    x, w, up = (tensor(s, torch.bfloat16, device) for s in ((64, 256), (512, 256), (512, 256)))

    def step():
        return family.linear(x, w, activation="gelu"), family.gated_linear(x[:16], w, up), family.linear(x[:1], w)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    x.copy_(x.flip(0)), graph.replay()
    for r, e in zip(results, step()):
        assert torch.equal(r, e)
    assert not torch.equal(results[0], expected[0])


def test_far_residual(family, device, tmp_path):
    """A residual whose last rows begin past 2^31 elements."""
    x, w, r = (tensor(s, torch.bfloat16, device) for s in ((8, 16), (24, 16), (8, 24)))
    room = 2**31 // 7 + 64
    far = vast(8 * room, device, tmp_path).as_strided((8, 24), (room, 1)).copy_(r)
    assert torch.equal(family.linear(x, w, residual=far), family.linear(x, w, residual=r))


def test_bad_input(family, device):
    x, w, b = tensor((4, 8), device=device), tensor((6, 8), device=device), tensor((6,), device=device)
    linear, gated, matmul = family.linear, family.gated_linear, family.matmul
    cases = [
        (TypeError, "linear: x must be a tensor, got list", lambda: linear([1.0], w)),
        (TypeError, "linear: x must have dtype float64 | float32", lambda: linear(x.long(), w)),
        (TypeError, "linear: weight must be a tensor, got NoneType", lambda: linear(x, None)),
        (TypeError, "linear: weight must have x's dtype float32, got float16", lambda: linear(x, w.half())),
        (ValueError, "linear: weight must have shape (N, 8) as x has (4, 8), got (8, 6)", lambda: linear(x, w.T)),
        (ValueError, "linear: weight must have shape (N, 8) as x has (4, 8), got (6,)", lambda: linear(x, b)),
        (ValueError, "linear: x must have 1 or more dimensions, got shape ()", lambda: linear(x[0, 0], w)),
        (ValueError, "linear: bias must have shape (6,), got (5,)", lambda: linear(x, w, b[:5])),
        (ValueError, "linear: residual must have shape (4, 6), got (4, 8)", lambda: linear(x, w, residual=x)),
        (ValueError, "linear: activation must be one of 'relu'", lambda: linear(x, w, activation="swish")),
        (ValueError, "linear: precision must be one of 'ieee', 'tf32', got 'x'", lambda: linear(x, w, precision="x")),
        (ValueError, "linear: out_dtype must be one of", lambda: linear(x, w, out_dtype=torch.int8)),
        (TypeError, "linear: batch_invariant must be True or False, got 1", lambda: linear(x, w, batch_invariant=1)),
        (ValueError, "gated_linear: weight_up must have shape (6, 8), got (4, 8)", lambda: gated(x, w, x)),
        (ValueError, "gated_linear: weight_up must have shape (N, 8) as x", lambda: gated(x, w, w.T)),
        (ValueError, "gated_linear: activation must be one of 'relu'", lambda: gated(x, w, w, None)),
        (TypeError, "gated_linear: weight_up must have x's dtype float32", lambda: gated(x, w, w.double())),
        (ValueError, "matmul: b must have 8 rows as a has columns, got shapes (4, 8), (6, 8)", lambda: matmul(x, w)),
        (ValueError, "matmul: a and b must have batches that broadcast, got (2, 4, 8), (3, 8, 6)",
         lambda: matmul(x.expand(2, 4, 8), w.T.expand(3, 8, 6))),
        (ValueError, "matmul: a and b must have 1 or more dimensions", lambda: matmul(x, b[0])),
        (ValueError, "matmul: bias must be None where b is a vector", lambda: matmul(w.T, b, bias=b)),
        (TypeError, "matmul: b must have a's dtype float32, got bfloat16", lambda: matmul(x, w.T.bfloat16())),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_opcheck(family, device):
    x, w, b, r = (tensor(s, device=device).requires_grad_() for s in ((2, 3, 4), (5, 4), (5,), (2, 3, 5)))
    wt = w.detach().mT.requires_grad_()
    opcheck(family.matmul_fwd, (x, wt, b, r, "silu", 1.0, 0.0, None, "ieee", False, True))
    opcheck(family.matmul_fwd, (x, wt, None, None, None, 0.0, 0.0, torch.float64, "ieee", True, False))
    u = tensor((5, 4), device=device).requires_grad_()
    opcheck(family.gated_linear_fwd, (x, w, u, "gelu", 0.0, 0.0, "ieee", False, True))
    x2, ut = (t.detach().clone().requires_grad_() for t in (x, u.mT))
    opcheck(family.sum_of_products_fwd, (x, wt, x2, ut, "ieee"))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, w, b, r = (tensor(s, torch.bfloat16, device).requires_grad_() for s in ((20, 24), (16, 24), (16,), (20, 16)))
    for direct, op in (
        (
            family.linear(x, w, b, activation="gelu", residual=r),
            family.matmul_fwd(x, w.mT, b, r, "gelu", 0.0, 0.0, None, "ieee", False, True)[0],
        ),
        (family.gated_linear(x, w, w), family.gated_linear_fwd(x, w, w, "silu", 1.0, 0.0, "ieee", False, True)[0]),
    ):
        assert torch.equal(direct, op)
        grads = (torch.autograd.grad(y, (x, w), torch.ones_like(y)) for y in (direct, op))
        assert all(torch.equal(*pair) for pair in zip(*grads))


def test_compile(family, device, backend):
    def step(x, w, b, u):
        h = family.gated_linear(x, w, u)
        return family.linear(h * 2, w.T, activation="gelu", residual=x) + family.matmul(x, w.T, bias=b).sum()

    tensors = [tensor(s, device=device, scale=0.5) for s in ((2, 3, 8), (16, 8), (16,), (16, 8))]
    dy = tensor((2, 3, 8), device=device)
    (y,), grads = evaluate(step, tensors, {}, [dy])
    (z,), found = evaluate(torch.compile(step, fullgraph=True, backend=backend), tensors, {}, [dy])
    for a, b in zip((y, *grads), (z, *found)):
        assert_close(b, a.double(), dim=None)


def test_derivatives(family, device):
    x, w, b, r, u = (tensor(s, torch.float64, device).requires_grad_() for s in ((1, 2), (2, 2), (2,), (1, 2), (2, 2)))
    ours, _ = linear_of(family, activation="gelu_tanh")
    assert gradcheck(ours, (x, w, b, r)) and gradgradcheck(ours, (x, w, b, r))
    assert gradgradcheck(family.gated_linear, (x, w, u))
    assert gradgradcheck(family.matmul, (w.unsqueeze(1), u.mT))


def test_penalty_on_the_gradient(family, device):
    """A loss of both the result and its gradient: the saved products have a gradient of their own."""
    x, w, u = (tensor(s, torch.float64, device).requires_grad_() for s in ((2, 3), (2, 3), (2, 3)))

    def penalised(y):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(y.pow(2).sum() + dx.pow(2).sum(), (x, w))

    pairs = [
        (family.linear(x, w, activation="gelu"), F.gelu(F.linear(x, w))),
        (family.gated_linear(x, w, u), F.silu(F.linear(x, w)) * F.linear(x, u)),
    ]
    for ours, torchs in pairs:
        for mine, theirs in zip(penalised(ours), penalised(torchs)):
            assert_close(mine, theirs, dim=None)


def test_transforms(family, device):
    x, w, b, u = (tensor(s, torch.float64, device) for s in ((2, 3, 4), (5, 4), (5,), (5, 4)))

    def loss(x, w, b, u):
        return (family.linear(x, w, b, activation="silu") * family.gated_linear(x, w, u)).sum()

    def torchs(x, w, b, u):
        z = F.linear(x, w)
        return (F.silu(z + b) * (F.silu(z) * F.linear(x, u))).sum()

    for mine, theirs in zip(*(torch.func.grad(f, (0, 1, 2, 3))(x, w, b, u) for f in (loss, torchs))):
        assert_close(mine, theirs, dim=None)
    for dims in ((0, None, None, None), (1, None, None, None)):  # a gradient a sample
        pair = (torch.func.vmap(torch.func.grad(f, (0, 1)), dims)(x, w, b, u) for f in (loss, torchs))
        for mine, theirs in zip(*pair):
            assert_close(mine, theirs, dim=None)
    models, inputs = tensor((2, 3, 4), torch.float64, device), tensor((2, 4), torch.float64, device)
    assert_close(
        torch.func.vmap(family.matmul)(models, inputs), torch.func.vmap(torch.matmul)(models, inputs), dim=None
    )
    batched = torch.func.vmap(lambda x: family.matmul(x[0], w.mT.expand(3, 4, 5)))(x.unsqueeze(1))  # b has more dims
    assert_close(batched, torch.matmul(x.unsqueeze(1), w.mT.expand(3, 4, 5)), dim=None)
    assert torch.equal(torch.func.vmap(lambda x: family.linear(x, w, b))(x), family.linear(x, w, b))
