"""Tile plans, as data: configs/<table>.json, looked up by device, dtype and sizes.

A table is a list of rows {"when": {...}, "plan": {...}, "measured": ... | "reasoned": "why"}. A row's "when" names
facts that must hold: a list of two numbers is a range with both ends in it (null: open), a list of strings is a choice,
and anything else must be equal. Rows that name an exact device come before those that name an architecture, those
before the rest, and otherwise as in the file. The first that holds, and whose plan fits the device, is taken.
"""

import functools
import json
import os
import threading
from pathlib import Path

from ._device import quickest
from ._triton import OutOfResources

_CONFIGS = Path(__file__).parent / "configs"

# Whether plans are looked for by timing all that fit, at the first call of a kind. Read once.
AUTOTUNE = os.environ.get("PORTABLE_KERNELS_AUTOTUNE", "0") == "1"
_searched = {}

_refused = {}  # by what was asked of `find`: plans that did not fit after all
_chosen = threading.local()  # .last: what this thread asked last, and was given


@functools.cache
def _rows(table):
    rows = json.loads((_CONFIGS / f"{table}.json").read_text(encoding="utf-8"))
    return sorted(rows, key=lambda row: 0 if "device" in row["when"] else 1 if "arch" in row["when"] else 2)


def _holds(condition, value):
    if not isinstance(condition, list):
        return condition == value
    if value is None or isinstance(value, (str, bool)):
        return value in condition
    low, high = condition
    return (low is None or low <= value) and (high is None or value <= high)


def find(table, kind, fits, device, dtype, **sizes):
    """The plan of configs/<table>.json for these sizes, as a `kind` (a NamedTuple with defaults).

    Args:
        fits: fits(plan, device, dtype, **sizes): whether the device can run it, as far as can be told beforehand.
        device: _device.Device.
        dtype: torch.dtype of the operands.
        sizes: whatever else the table's rows or `fits` ask about.
    """
    asked = (table, kind, fits, device, dtype, tuple(sizes.items()))
    plan = _find(*asked, _refused.get(asked, ()))
    _chosen.last = asked, plan
    return plan


@functools.lru_cache(8192)
def _find(table, kind, fits, device, dtype, sizes, refused):
    sizes = dict(sizes)
    facts = {"device": device.name, "arch": device.arch, "dtype": str(dtype).replace("torch.", ""), **sizes}
    for row in _rows(table):
        if all(_holds(condition, facts[name]) for name, condition in row["when"].items()):
            plan = kind(**row["plan"])
            if plan not in refused and fits(plan, device, dtype, **sizes):
                return plan
    raise LookupError(f"configs/{table}.json has no plan that fits {device}, {dtype}, {sizes}")


def falls_back(function):
    """`function`, whose last argument is plan=None, called again with the next plan where the one it found did not fit.

    How much shared memory a kernel takes is the compiler's to say, and differs from one version of it to another.
    """

    last = function.__code__.co_argcount - 1

    @functools.wraps(function)
    def call(*args, **kwargs):
        given = args[last] if len(args) > last else kwargs.get("plan")
        while True:
            try:
                return function(*args, **kwargs)
            except OutOfResources:
                asked, tried = _chosen.last
                if given is not None or tried in _refused.get(asked, ()):
                    raise
                _refused[asked] = (*_refused.get(asked, ()), tried)

    return call


def search(table, kind, fits, device, dtype, run, **sizes):
    """The plan of the table that takes the least time here, whatever its "when"; as `find` where none can be timed.

    Args:
        run: run(plan), the call itself; may be repeated.
        device: torch.device, and its facts.
    """
    device, known = device
    key = (table, known, dtype, *sizes.items())
    if key not in _searched:
        plans = [kind(**row["plan"]) for row in _rows(table)]
        plans = [plan for plan in dict.fromkeys(plans) if fits(plan, known, dtype, **sizes)]
        best = quickest(device, [functools.partial(run, plan) for plan in plans])
        if best is None:
            return find(table, kind, fits, known, dtype, **sizes)
        _searched[key] = plans[best]
    return _searched[key]


def shared_bytes(block_m, block_n, block_k, stages, itemsize):
    """Shared memory of a tile's operands, `stages` deep."""
    return (block_m + block_n) * block_k * itemsize * stages
