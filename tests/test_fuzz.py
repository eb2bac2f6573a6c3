"""Layouts crossed with dtypes, drawn: the same ones each time, or FUZZ=<how many> others (`make fuzz`)."""

import os

import pytest
from _calls import NAMES
from _numerics import DTYPES
from test_every_op import ALL_LAYOUTS, INTERPRET, Call, hold_layouts

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


@settings(
    max_examples=int(os.environ.get("FUZZ", 2 if INTERPRET else 30)), derandomize="FUZZ" not in os.environ,
    deadline=None, database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
def test_layouts_crossed_with_dtypes(kernel, device, data):
    name = data.draw(st.sampled_from(NAMES))
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([64, 128, 192]))
    call = Call(kernel, name, device, dtype, rows=rows, columns=columns)
    layouts = {n: data.draw(st.sampled_from(ALL_LAYOUTS)) for n in call.tensors}
    hold_layouts(call, layouts, data.draw(st.sampled_from(ALL_LAYOUTS)))
