"""Loads the package as users do: built afresh into a temporary folder, then `kernels.get_kernel`.

The same tests run on the CPU path, on the CPU with the kernels in the interpreter (TRITON_INTERPRET=1), and on a GPU.
"""

import collections
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAMILY_SECONDS = 300.0  # what one test file may take on the CPU: twice the slowest, so that `make test` stays quick

sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the environment
        from kernels.compat import tomllib

        general = tomllib.loads((ROOT / "build.toml").read_text())["general"]
        os.environ["PORTABLE_KERNELS_TESTED"] = f"{general['hub']['repo-id']}@{general['version']}"
        if (ROOT / "tools").exists():  # kernel-builder's CI has no tools/, and tests what is published
            from build_local import build

            config.built = tempfile.mkdtemp(prefix="portable-kernels-")
            build(ROOT, config.built, load=False)
            os.environ["LOCAL_KERNELS"] = f"{general['hub']['repo-id']}={config.built}"

    import _interpreter
    import torch

    if hasattr(config, "workerinput"):  # a worker has one core: more threads wait for each other
        torch.set_num_threads(1)
    _interpreter.quicken()
    # Makes torch fill what empty() returns with NaN: memory that no kernel wrote shows.
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_unconfigure(config):
    if hasattr(config, "built"):
        shutil.rmtree(config.built, ignore_errors=True)


@pytest.fixture(scope="session")
def kernel():
    """The package, as get_kernel gives it."""
    from kernels import get_kernel

    repo_id, version = os.environ["PORTABLE_KERNELS_TESTED"].split("@")
    loaded = get_kernel(repo_id, version=int(version))
    # A test's second call of a kind repeats its first.
    importlib.import_module(f"{loaded.__name__}._replay")._SEEN = 0
    return loaded


@pytest.fixture(scope="session")
def internals(kernel):
    """internals("rms_norm"): a module of the package, where the package's attribute of that name is a function."""
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


@pytest.fixture(scope="session")
def device():
    import torch

    for kind in ("xpu", "cuda"):
        if getattr(torch, kind).is_available():
            return torch.device(kind, 0)
    return torch.device("cpu")


@pytest.fixture(scope="session")
def on_kernels(internals, device):
    """True where `device` goes through the Triton kernels."""
    return internals("_device").runs_kernels(device)


@pytest.fixture(scope="session")
def backend(device):
    """torch.compile's. On the CPU only a few tests wait for a compiler of C++; the graphs are the same."""
    every_case = device.type != "cpu" or "PROOF" in os.environ
    return "inductor" if every_case else "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)
    yield
    if torch.accelerator.is_available() and torch.accelerator.memory_reserved() > 2**30:  # others test there too
        torch.accelerator.empty_cache()


_seconds = collections.Counter()


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.split("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter):
    if _seconds:
        spent = ", ".join(f"{Path(f).stem} {s:.0f}" for f, s in _seconds.most_common() if s >= 1)
        terminalreporter.write_line(f"seconds by file: {spent}")


def pytest_sessionfinish(session):
    import torch

    every_case = "PROOF" in os.environ or "PORTABLE_KERNELS_KIT" in os.environ  # targets of their own, which take long
    slow = [f for f, s in _seconds.items() if s > FAMILY_SECONDS and not every_case]
    if slow and not torch.accelerator.is_available() and not hasattr(session.config, "workerinput"):
        print(f"\nover {FAMILY_SECONDS:.0f} s, choose fewer or smaller cases: {', '.join(slow)}")
        session.exitstatus = session.exitstatus or 1
