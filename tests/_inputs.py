"""Tensors of every layout that callers pass."""

import os

import torch

LAYOUTS = ("contiguous", "transposed", "rows_sliced", "columns_sliced", "expanded", "offset")


def few(cases, step=2):
    """The cases; every step-th in the interpreter, which takes ten times as long, where PROOF is not set."""
    every_case = os.environ.get("TRITON_INTERPRET") != "1" or "PROOF" in os.environ
    return list(cases) if every_case else list(cases)[::step]


def tensor(shape, dtype=torch.float32, device="cpu", layout="contiguous", scale=1.0):
    """Normal values of the given shape, in memory as `layout` says."""

    def draw(*s):
        return (torch.randn(s, dtype=torch.float64) * scale).to(dtype).to(device)

    if layout == "contiguous":
        return draw(*shape)
    if layout == "transposed":  # dimensions in memory in reverse order
        return draw(*reversed(shape)).permute(*reversed(range(len(shape))))
    if layout == "rows_sliced":
        return draw(2 * shape[0], *shape[1:])[::2]
    if layout == "columns_sliced":
        return draw(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded":
        return draw(1, *shape[1:]).expand(*shape)
    if layout == "offset":  # contiguous, but not aligned to 16 bytes
        n = torch.Size(shape).numel()
        return draw(n + 1)[1:].view(*shape)
    raise ValueError(layout)


def relaid(t, layout):
    """The values of t, in memory as `layout` says: one of LAYOUTS, "padded" rows, or "odd" strides of sizes of 1.

    "expanded" has the values of t's first row in all.
    """
    if not t.dim() or not t.numel() or layout == "contiguous":
        return t.contiguous()
    if layout == "transposed":
        order = tuple(reversed(range(t.dim())))
        return t.permute(order).contiguous().permute(order)
    if layout == "expanded":
        return t[:1].contiguous().expand(t.shape)
    if layout == "offset":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if layout == "odd":  # torch asks for nothing of the stride of a size of 1
        strides = (7 if size == 1 else stride for size, stride in zip(t.shape, t.contiguous().stride()))
        return t.contiguous().as_strided(t.shape, tuple(strides))
    sizes = list(t.shape)
    if layout == "rows_sliced":
        sizes[0] *= 2
        place = (slice(None, None, 2),)
    elif layout == "columns_sliced":
        sizes[-1] *= 2
        place = (..., slice(None, None, 2))
    elif layout == "padded":
        sizes[-1] += 3
        place = (..., slice(1, -2))
    else:
        raise ValueError(layout)
    return t.new_full(sizes, torch.nan if t.is_floating_point() else 0)[place].copy_(t)


def apart(t, shape):
    """The values of t, whose first dimension becomes dimensions of that shape, none of which lies beside another."""
    space = t.new_full([n + 2 for n in shape] + list(t.shape[1:]), torch.nan if t.is_floating_point() else 0)
    return space[tuple(slice(1, n + 1) for n in shape)].copy_(t.unflatten(0, shape))


def amid(empty):
    """A torch.empty beside whose memory lies NaN."""

    def make(*shape, **options):
        shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        space = empty(shape.numel() + 256, **options)
        if space.is_floating_point():
            space.fill_(torch.nan)
        return space[128 : 128 + shape.numel()].view(shape)

    return make


def vast(size, device, folder, dtype=torch.bfloat16):
    """Memory of which little is touched: of a GPU, or of a file that takes no room until it is written to."""
    if device.type == "cpu":
        return torch.from_file(str(folder / "vast"), shared=True, size=size, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=device)
