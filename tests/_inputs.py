"""Tensors of every layout that callers pass."""

import torch

LAYOUTS = ("contiguous", "transposed", "rows_sliced", "columns_sliced", "expanded", "offset")


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
