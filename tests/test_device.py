"""The launch of a kernel that was compiled before, with a GPU and a compiler that only take notes."""

from types import SimpleNamespace

import pytest
import torch


class Kernel:
    """As triton.jit gives it: compiles whatever it is launched with, and says what came."""

    arg_names = ("x_ptr", "N", "eps", "BLOCK", "ONE_PASS")
    params = [SimpleNamespace(is_constexpr=name.isupper() and name != "N") for name in arg_names]

    def __init__(self):
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.compiled.append((grid, args, options))
            return SimpleNamespace(run=lambda *a: self.ran.append(a), function="function", packed_metadata="metadata")

        return launch


@pytest.fixture
def launch(internals, monkeypatch):
    module = internals("_device")
    hook = SimpleNamespace(calls=[])
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: f"stream {index}"))
    triton = SimpleNamespace(
        runtime=SimpleNamespace(driver=driver), knobs=SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hook))
    )
    monkeypatch.setattr(module, "triton", triton)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_kinds", {})
    monkeypatch.setattr(module, "current", lambda: 0)

    def launch(kernel, x, N=8, eps=1e-6, grid=(3,), **options):
        module.launch(kernel, grid, torch.device("cuda", 0), (x, N, eps), **{"BLOCK": 16, "ONE_PASS": True, **options})

    launch.hook = hook
    return launch


def test_a_second_launch_goes_to_the_compiled_kernel(launch):
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, x, num_warps=4)
    launch(kernel, x, num_warps=4)
    launch(kernel, torch.ones(64), grid=(5, 2), num_warps=4)
    assert len(kernel.compiled) == 1 and len(kernel.ran) == 2
    assert kernel.ran[0][:9] == (3, 1, 1, "stream 0", "function", "metadata", None, None, None)
    assert kernel.ran[0][9] is x and kernel.ran[0][10:] == (8, 1e-6, 16, True)  # in the order of the signature
    assert kernel.ran[1][:3] == (5, 2, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(64)[1:]},  # not aligned to 16 bytes
        {"x": None},
        {"N": 16},
        {"N": 1},
        {"N": 2**31},
        {"N": 8.0},
        {"BLOCK": 32},
        {"ONE_PASS": False},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_what_triton_specialises_on_compiles_anew(launch, other):
    kernel, first = Kernel(), {"x": torch.zeros(64), "num_warps": 4}
    launch(kernel, **first)
    launch(kernel, **{**first, **other})
    launch(kernel, **first)
    assert len(kernel.compiled) == 2 and len(kernel.ran) == 1


def test_other_numbers_do_not(launch):
    kernel, x = Kernel(), torch.zeros(64)
    for N, eps in ((8, 1e-6), (9, 1e-6), (-7, 1e-5)):
        launch(kernel, x, N=N, eps=eps)
    assert len(kernel.compiled) == 1 and kernel.ran[-1][10:12] == (-7, 1e-5)


def test_what_is_left_out_is_told_apart(launch):
    """None is compiled in, where a number is an argument."""
    kernel, x = Kernel(), torch.zeros(64)
    for N, eps in ((None, 0.5), (0.5, None)):
        launch(kernel, x, N=N, eps=eps)
    assert len(kernel.compiled) == 2


def test_integers_that_triton_tells_apart_are(internals):
    triton = pytest.importorskip("triton")
    specialised = triton.runtime.jit.native_specialize_impl
    base = triton.backends.compiler.BaseBackend
    kinds = {}
    for n in (0, 1, 2, 8, 15, 16, 17, 31, 31 * 16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**63 - 1, 2**63):
        for a in (n, -n)[: 2 - (n > 2**62)]:
            kinds.setdefault(internals("_device")._integer(a), set()).add(specialised(base, a, False, True, True))
    assert all(len(of) == 1 for of in kinds.values()) and len(kinds) > 6


def test_kernels_do_not_share(launch):
    one, two, x = Kernel(), Kernel(), torch.zeros(64)
    launch(one, x), launch(two, x)
    assert len(one.compiled) == len(two.compiled) == 1


def test_a_profiler_hears_of_every_launch(launch):
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, x)
    launch.hook.calls.append(print)
    launch(kernel, x)
    assert len(kernel.compiled) == 2 and not kernel.ran


def test_sizes_that_never_repeat_do_not_pile_up(launch, internals):
    kernel, x = Kernel(), torch.zeros(64)
    for N in range(5000):
        launch(kernel, x, BLOCK=N)
    assert len(internals("_device")._compiled) <= 4096


def test_first_launches_are_collected(launch, internals):
    """While something collects, a kernel that was compiled runs, and one that was not is handed over."""
    kernel, other, x, taken = Kernel(), Kernel(), torch.zeros(64), []
    launch(kernel, x)
    internals("_device").watching.collect = lambda *launched: taken.append(launched)
    try:
        launch(kernel, x)
        launch(other, x)
    finally:
        internals("_device").watching.collect = None
    assert len(kernel.ran) == 1 and not other.compiled and not other.ran
    assert taken[0][1:4] == (other, (3,), torch.device("cuda", 0)) and taken[0][4][0] is x
    launch(other, x)
    assert len(other.compiled) == 1


def test_precision_of_float32_by_every_setting(kernel, internals, device):
    """torch has an old way and a new one to set it, and its own reader of the old way raises after the new one."""
    precision = internals("_device").float32_precision
    x = torch.randn(8, 8, device=device)
    matmul = torch.backends.cuda.matmul
    old = torch.get_float32_matmul_precision()
    try:
        for name, expected in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
            torch.set_float32_matmul_precision(name)
            assert precision() == expected
        if hasattr(matmul, "fp32_precision"):
            for name in ("tf32", "ieee"):
                matmul.fp32_precision = name
                assert precision() == name
                kernel.rms_norm(x, x[0])
                kernel.matmul(x, x)
                kernel.grouped_mm(x[None], x[None])
                kernel.flash_attn_func(*[x.view(1, 8, 1, 8)] * 3, softcap=1.0)
    finally:
        torch.set_float32_matmul_precision(old)


def test_descriptors_are_filled_as_triton_fills_them(internals, monkeypatch):
    """A repeat calls the launcher that Triton's wrapper calls, with what the wrapper makes of the arguments."""
    module = internals("_device")

    def fill(*args):
        return ("map", *args)

    utils = SimpleNamespace(fill_tma_descriptor=fill)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(module, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(module, "DIRECT", True)
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
    names = {"TMA_DTYPE_DEVICE_TO_HOST": {10: 9}}
    source = """
def wrap(launcher, tensordesc_indices, tensordesc_meta):
    def inner(*args):
        return launcher, tensordesc_indices, tensordesc_meta, TMA_DTYPE_DEVICE_TO_HOST
    return inner
"""
    exec(source, names)  # noqa: S102
    descriptor = SimpleNamespace(shape=[8, 64], strides=[64, 1], padding="zero")
    launcher, (filler,) = module._fillers(names["wrap"](print, {0}, [meta]))
    function, options, rest = filler(descriptor)
    assert launcher is print and function is fill
    assert (*options, *rest) == (3, 2, 9, [1, 64], [8, 64], [64, 1], 0, 8, 64, 64, 1)
    for run in (names["wrap"](print, {0}, [None]), names["wrap"](print, {0}, [{**meta, "fp4_padded": True}]), print):
        assert module._fillers(run) == (run, ())
