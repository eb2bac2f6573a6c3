"""Tile plans, as data: configs/<table>.json, looked up by device, dtype and sizes.

A table is a list of rows {"when": {...}, "plan": {...}, "measured": ... | "reasoned": "why"}. A row's "when" names
facts that must hold: a list of two numbers is a range with both ends in it (null: open), a list of strings is a choice,
and anything else must be equal. Rows that name an exact device come before those that name an architecture, those
before the rest, and otherwise as in the file. The first that holds, and whose plan fits the device, is taken.
"""

import functools
import json
import os
from pathlib import Path

from ._device import quickest

_CONFIGS = Path(__file__).parent / "configs"

# Whether plans are looked for by timing all that fit, at the first call of a kind. Read once.
AUTOTUNE = os.environ.get("PORTABLE_KERNELS_AUTOTUNE", "0") == "1"
_searched = {}


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


@functools.lru_cache(8192)
def find(table, kind, fits, device, dtype, **sizes):
    """The plan of configs/<table>.json for these sizes, as a `kind` (a NamedTuple with defaults).

    Args:
        fits: fits(plan, device, dtype, **sizes): whether the device can run it.
        device: _device.Device.
        dtype: torch.dtype of the operands.
        sizes: whatever else the table's rows or `fits` ask about.
    """
    facts = {"device": device.name, "arch": device.arch, "dtype": str(dtype).replace("torch.", ""), **sizes}
    for row in _rows(table):
        if all(_holds(condition, facts[name]) for name, condition in row["when"].items()):
            plan = kind(**row["plan"])
            if fits(plan, device, dtype, **sizes):
                return plan
    raise LookupError(f"configs/{table}.json has no plan that fits {device}, {dtype}, {sizes}")


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
