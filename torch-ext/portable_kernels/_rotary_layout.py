"""Which dimension of a rotary op's operand is what, and whether they fit: b (batch), t (token), h (head), d."""

import torch

from . import _checks

_INTEGERS = (torch.int32, torch.int64)


def layout_of(x, heads_dim):
    """The names of x's dimensions; heads_dim counts from the right."""
    return "b" * (x.dim() - 3) + ("htd" if heads_dim == -3 else "thd")


def heads_dim(unsqueeze_dim, cos, mrope_section):
    """The dimension of q and k, from the right, that the tables' new dimension lines up with."""
    rank = 4 if mrope_section else cos.dim() + 1
    return unsqueeze_dim - rank if unsqueeze_dim >= 0 else unsqueeze_dim


def in_memory_order(x, layout):
    """x with its leading dimensions in the order they have in memory, and their names."""
    lead = x.dim() - 1
    if x.is_contiguous() or any(x.stride(i) == 0 and x.shape[i] > 1 for i in range(lead)):
        return x, layout
    order = []
    for i in range(lead):  # by insertion: torch.compile sorts no sizes that vary
        after = [j for j in order if x.stride(j) < x.stride(i)]
        order.insert(len(order) - len(after), i)
    if order == list(range(lead)):
        return x, layout
    return x.permute(*order, lead), "".join(layout[i] for i in order) + "d"


def in_order(y, ordered, layout):
    """y, contiguous with its dimensions `ordered`, as a view with those of `layout`."""
    y = y.contiguous()
    return y if ordered == layout else y.permute([ordered.index(c) for c in layout])


def from_row(cos, sin, offset, x, layout, cu_seqlens):
    """(cos, sin, None), the tables from row `offset` on: a row for each token, or all for packed sequences."""
    rows = cos.shape[-2] - offset if cu_seqlens is not None else x.shape[layout.index("t")]
    return cos.narrow(-2, offset, rows), sin.narrow(-2, offset, rows), None


def check_pair(op, q, k, cos, sin, unsqueeze_dim, interleaved, mrope_section=None, **weights):
    """The layout of q and k."""
    if q is None and k is None:
        raise TypeError(f"{op}: q or k must be a tensor, got None for both")
    name, x = ("k", k) if q is None else ("q", q)
    _checks.tensors(op, x, first=name, k=None if q is None else k, **weights)
    require_tables(op, x, name, cos, sin)
    _checks.integer(op, "unsqueeze_dim", unsqueeze_dim)
    _checks.flags(op, interleaved=interleaved)
    axes = check_sections(op, mrope_section, cos.shape[-1])
    lined_up = heads_dim(unsqueeze_dim, cos, mrope_section)
    layout = check_layout(op, "unsqueeze_dim", unsqueeze_dim, x, lined_up)
    if q is not None and k is not None:
        expected = list(q.shape)
        if k.dim() == q.dim():
            expected[lined_up] = k.shape[lined_up]
        _checks.shape(op, "k", k, expected)
    check_tables(op, x, layout, cos, sin, cos.shape[-1], axes)
    return layout


def require_tables(op, x, name, cos, sin):
    for table, t in (("cos", cos), ("sin", sin)):
        if t is None:
            raise TypeError(f"{op}: {table} must be a tensor, got NoneType")
    _checks.tensors(op, x, first=name, cos=cos, sin=sin)
    if cos.dim() < 2:
        raise ValueError(f"{op}: cos must have 2 dimensions or more, got {tuple(cos.shape)}")


def check_layout(op, argument, value, x, lined_up):
    if x.dim() not in (3, 4):
        raise ValueError(f"{op}: heads must lie in a tensor of 3 or 4 dimensions, got {tuple(x.shape)}")
    if lined_up not in (-3, -2):
        raise ValueError(
            f"{op}: {argument} must be one of the two dimensions before the last of {tuple(x.shape)}, got {value}"
        )
    return layout_of(x, lined_up)


def check_sections(op, sections, rotary_dim):
    """How many axes there are; 0 without sections."""
    if not isinstance(sections, (type(None), tuple, list)) or any(type(n) is not int for n in sections or ()):
        raise TypeError(f"{op}: mrope_section must be a list of ints or None, got {sections!r}")
    if not sections:
        return 0
    if len(sections) not in (2, 3) or sum(sections) * 2 != rotary_dim or min(sections) < 0:
        raise ValueError(
            f"{op}: mrope_section must be 2 or 3 numbers of pairs with sum {rotary_dim // 2}, got {list(sections)}"
        )
    return len(sections)


def check_tables(op, x, layout, cos, sin, rotary_dim, axes=0, indexed=False):
    """Refuse tables that have no row of rotary_dim or rotary_dim / 2 entries for each token, or for each position."""
    _checks.shape(op, "sin", sin, cos.shape)
    D, S = x.shape[-1], x.shape[layout.index("t")]
    B = x.shape[layout.index("b")] if "b" in layout else 1
    if rotary_dim % 2 or not 0 <= rotary_dim <= D:
        raise ValueError(f"{op}: cos must rotate an even number of dimensions up to {D}, got {rotary_dim}")
    if cos.shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise ValueError(f"{op}: rotary_dim must be once or twice cos.shape[-1], got {rotary_dim} and {cos.shape[-1]}")
    R = cos.shape[-1]
    if indexed:
        if cos.dim() != 2 or not cos.shape[0]:
            raise ValueError(f"{op}: cos must have shape (positions, {R}), got {tuple(cos.shape)}")
        return
    lead = (axes,) if axes else ()
    allowed = [(*lead, B, S, R), (*lead, 1, S, R)] + ([] if axes else [(S, R)])
    if tuple(cos.shape) not in allowed:
        raise ValueError(f"{op}: cos must have shape {' or '.join(map(str, allowed))}, got {tuple(cos.shape)}")


def check_index(op, x, layout, cos, sin, axes, position_ids, offsets, cu_seqlens):
    """Refuse what finds no positions, and combinations that would be ambiguous."""
    B = x.shape[layout.index("b")] if "b" in layout else 1
    S = x.shape[layout.index("t")]
    if position_ids is not None:
        if offsets is not None or cu_seqlens is not None:
            raise ValueError(f"{op}: offsets and cu_seqlens must be None with position_ids, which say it all")
        lead = (axes,) if axes else ()
        _integers(op, "position_ids", position_ids, x, [(*lead, B, S), (*lead, 1, S)] + ([] if axes else [(S,)]))
    if cu_seqlens is not None:
        if "b" in layout:
            raise ValueError(f"{op}: cu_seqlens must come with a packed x (T, H, D), got {tuple(x.shape)}")
        _integers(op, "cu_seqlens", cu_seqlens, x, None)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"{op}: cu_seqlens must have shape (N + 1,), N at least 1, got {tuple(cu_seqlens.shape)}")
    if axes and (offsets is not None or cu_seqlens is not None):
        raise ValueError(f"{op}: mrope_section must go with position_ids or tables of all axes, not with offsets")
    if isinstance(offsets, int) and not isinstance(offsets, bool):
        _checks.number(op, "offsets", offsets, low=0)
        needed = offsets + (S if cu_seqlens is None else 0)
        if cos.shape[-2] < needed:
            raise ValueError(f"{op}: cos must have {needed} rows or more, got shape {tuple(cos.shape)}")
        _checks.shape(op, "sin", sin, cos.shape)
    elif offsets is not None:
        _integers(op, "offsets", offsets, x, [(B,) if cu_seqlens is None else (len(cu_seqlens) - 1,)])


def _integers(op, name, t, x, shapes):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must have dtype int32 | int64, got {str(t.dtype).replace('torch.', '')}")
    if t.device != x.device:
        raise ValueError(f"{op}: {name} must be on {x.device} as x is, got {t.device}")
    if shapes is not None and tuple(t.shape) not in shapes:
        raise ValueError(f"{op}: {name} must have shape {' or '.join(map(str, shapes))}, got {tuple(t.shape)}")
