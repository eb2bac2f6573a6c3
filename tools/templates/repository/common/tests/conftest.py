"""Loads the package as users do: built into a temporary folder, then get_kernel."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

# torch fills what empty() returns with NaN: memory that no kernel wrote shows.
torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="session")
def kernel():
    from kernels import get_kernel

    if (ROOT / "tools").exists():  # kernel-builder's own test run has none: it tests what is published
        from build_local import build

        os.environ["LOCAL_KERNELS"] = f"org/my-kernel={build(ROOT, tempfile.mkdtemp())}"
    return get_kernel("org/my-kernel", version=1)


@pytest.fixture(scope="session")
def device():
    for kind in ("xpu", "cuda"):
        if getattr(torch, kind).is_available():
            return torch.device(kind)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
