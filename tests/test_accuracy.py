"""The published rule: never more than PyTorch's own error plus one ulp, or a reason why."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "tools" / "accuracy.py").exists():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)

import accuracy  # noqa: E402


def test_page_is_what_was_measured():
    """docs/accuracy.md, written anew from benchmarks/results/."""
    assert (ROOT / "docs" / "accuracy.md").read_text() == accuracy.page(), "run python tools/accuracy.py --page"
    assert "not explained" not in accuracy.page()


@pytest.mark.parametrize("name", ["rms_norm", "silu", "linear"])
def test_a_sample_keeps_the_rule(kernel, device, on_kernels, name):
    path = "cpu" if not on_kernels else "interpreter" if device.type == "cpu" else "gpu"
    for row in accuracy.measure(kernel, device, path, [name], lambda text: None, compiles=False):
        for part, by in zip(("results", "gradients"), accuracy.over(row)):
            assert by <= 0 or accuracy.reason(path, row, part) != "not explained", row
