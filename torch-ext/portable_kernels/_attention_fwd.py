"""Attention, forward: one pass over the keys that a tile of queries sees, with a running maximum and sum."""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _attention_decode
from ._attention import (
    LN2,
    LOG2E,
    LOWEST,
    fold,
    keep_scale,
    kept,
    load_tile,
    options,
    scores,
    sequence,
    spans,
    strides,
    tile_and_head,
    unit_last_stride,
)
from ._attention_chunks import forward_in_chunks
from ._device import facts, float32_precision, launch
from ._ops import add_op_namespace_prefix
from ._rows import compute_dtype
from ._tiles import dot
from ._triton import GLUON, TensorDescriptor, cdiv, next_power_of_2, round_to, tl, triton

MAX_HEAD_DIM = 256  # of the kernels; wider heads are left to PyTorch


class Plan(NamedTuple):
    """kind: which kernel, and how it reads keys and values: "descriptor" (bulk copies), "pointer"; "sm90"; "decode"."""

    kind: str
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    num_warps: int

    def options(self):
        """What the launch takes."""
        return {"DESC": self.kind == "descriptor", **{n: v for n, v in self._asdict().items() if n != "kind"}}


def plan_forward(rows, block_d, itemsize, descriptors, device, plain=False, few=False, extras=""):
    """The launch for sequences of at most `rows` queries.

    Args:
        block_d: the wider head dimension, padded.
        descriptors: whether the operands allow bulk copies.
        plain: whether nothing is asked for but causality, which the kernel for Hopper GPUs knows.
        few: whether there are few queries of many keys, for the kernel that splits the keys.
        extras: "mask" where a mask is read, "more" where scores or weights are changed otherwise.
    """
    if few:
        return Plan("decode", 16, 64, 1, 4)  # it has plans of its own
    bulk = descriptors and device.descriptors and itemsize == 2
    if bulk and plain and GLUON and device.arch == "sm90" and block_d in (64, 128):
        return Plan("sm90", 128, 128, 2, 8)  # likewise
    kind = "descriptor" if bulk else "pointer"
    itemsize = 4 if device.arch.startswith("sm7") else itemsize  # of which Triton uses no tensor cores
    plans = []
    if itemsize == 2:
        if extras == "mask" and block_d > 64:  # its addresses take the registers of half the rows
            plans += [Plan(kind, 64, 64, 2, 8)]
        else:
            # 2 programs a multiprocessor: of cuDNN at S >= 4096, H200 bf16, 0.76 to 0.92 at D = 128, 0.89 to 0.94 at 64
            stages = 3 if bulk and block_d <= 64 else 2
            plans += [Plan(kind, 128, 64, stages, 8 if extras or block_d > 128 else 4)]
        plans += [Plan("pointer", 64, 32, 2, 4), Plan("pointer", 64, 32, 1, 4)]  # untuned: of smaller multiprocessors
    plans += [Plan("pointer", 32, 32, 1, 4 if block_d <= 64 else 8), Plan("pointer", 16, 16, 1, 4)]  # untuned: float32
    for plan in plans:
        if (plan.BLOCK_M + 2 * plan.STAGES * plan.BLOCK_N) * block_d * itemsize <= device.shared_memory:
            break
    return plan._replace(BLOCK_M=min(plan.BLOCK_M, max(next_power_of_2(rows), 16)))


@triton.jit(do_not_specialize=["heads", "H", "group", "Sq", "Sk", "tiles", "at_once", "left", "right", "threshold"])
def _attention_fwd_kernel(
    q, k, v, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, pages_ptr, mask_ptr, alibi_ptr, sinks_ptr, seed_ptr,
    heads, H, group, Sq, Sk, tiles, at_once, page_size,
    q_strides, k_strides, v_strides, o_strides, lse_strides, mask_strides, alibi_strides, pages_stride,
    scale, softcap, left, right, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, TOP_LEFT: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_k_ptr is not None
    PRECISE: tl.constexpr = o_ptr.dtype.element_ty == tl.float32
    tile, head = tile_and_head(tiles, heads, at_once, right is not None)
    b = head // H
    h = head % H
    hk = h // group
    first_q, Sq = sequence(cu_q_ptr, b, Sq)
    first_k, Sk = sequence(cu_k_ptr, b, Sk)
    n_q = tile * BLOCK_M
    if n_q >= Sq:
        return
    offset = 0 if TOP_LEFT else Sk - Sq
    b64 = b.to(tl.int64)
    if not DESC:
        q += b64 * q_strides[0] + h.to(tl.int64) * q_strides[1] + first_q * q_strides[2]
        k += hk.to(tl.int64) * k_strides[1]
        v += hk.to(tl.int64) * v_strides[1]
        if pages_ptr is None:
            k += b64 * k_strides[0] + first_k * k_strides[2]
            v += b64 * v_strides[0] + first_k * v_strides[2]
        else:
            pages_ptr += b64 * pages_stride
    if mask_ptr is not None:
        mask_ptr += b64 * mask_strides[0] + h.to(tl.int64) * mask_strides[1]
    b_desc = 0 if PACKED else b
    i = n_q + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b64 * alibi_strides[0] + h.to(tl.int64) * alibi_strides[1]).to(tl.float32)
    m = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32) + total
        m = tl.maximum(sink, m)
        total = tl.exp2((sink - m) * LOG2E)
        if FOLD:
            m = tl.maximum(m * LOG2E, LOWEST)
    factor = LOG2E
    if FOLD:
        factor = scale * LOG2E
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    q_tile = load_tile(q, q_strides, b_desc, h, first_q, n_q, Sq, None, 1, D, True, DESC, False, BLOCK_M, BLOCK_D)
    if FOLD and PRECISE:  # a product and a difference made one leave the product's rounding: much, of 2^31
        q_tile *= factor
        factor = 1.0
    last = min(n_q + BLOCK_M, Sq) - 1
    edges = spans(n_q, last, Sk, offset, left, right, BLOCK_N)
    for part in tl.static_range(3):  # masked from the left, not masked, masked from the right
        for n in tl.range(edges[part], edges[part + 1], BLOCK_N, num_stages=STAGES):
            k_tile = load_tile(
                k,
                k_strides,
                b_desc,
                hk,
                first_k,
                n,
                Sk,
                pages_ptr,
                page_size,
                D,
                part != 1,
                DESC,
                PACKED,
                BLOCK_N,
                BLOCK_D,
            )
            s, _ = scores(
                dot(q_tile, tl.trans(k_tile), zero, PRECISION), i[:, None], (n + offs_n)[None, :], Sq, Sk, offset,
                mask_ptr, mask_strides, slope, scale, softcap, left, right, FOLD, part != 1, PRECISE,
            )  # fmt: skip
            if FOLD:
                new_m = tl.maximum(m, tl.max(s, axis=1) * factor)
                p = tl.exp2(s * factor - new_m[:, None])
                alpha = tl.exp2(m - new_m)
            else:
                new_m = tl.maximum(m, tl.max(s, axis=1))
                p = tl.exp2((s - new_m[:, None]) * factor)
                alpha = tl.exp2((m - new_m) * factor)
            total = total * alpha + tl.sum(p, axis=1)
            acc = acc * alpha[:, None]
            if seed_ptr is not None:
                p = tl.where(kept(seed_ptr, head, i, n, threshold, BLOCK_M, BLOCK_N, False), p, 0.0)
            v_tile = load_tile(
                v, v_strides, b_desc, hk, first_k, n, Sk, pages_ptr, page_size, DV, part != 1, DESC, PACKED, BLOCK_N,
                BLOCK_DV,
            )  # fmt: skip
            acc = dot(round_to(p, v_tile.dtype), v_tile, acc, PRECISION)
            m = new_m
    lse = (m * LN2 if FOLD else m) + tl.log(total)  # -inf where no key was seen
    acc *= (keep_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    row = i.to(tl.int64)
    tl.store(lse_ptr + b64 * lse_strides[0] + h.to(tl.int64) * lse_strides[1] + first_q + row, lse, mask=i < Sq)
    o_ptr += b64 * o_strides[0] + h.to(tl.int64) * o_strides[1] + first_q * o_strides[2]
    offs_d = tl.arange(0, BLOCK_DV)
    tl.store(
        o_ptr + row[:, None] * o_strides[2] + offs_d[None, :],
        round_to(acc, o_ptr.dtype.element_ty),
        mask=(i < Sq)[:, None] & (offs_d < DV)[None, :],
    )


def precision(t, device):
    """How float32 tiles are multiplied: as torch's own products are asked to be."""
    return float32_precision() if t.dtype == torch.float32 and device.tf32 else "ieee"


def describe(t, packed, block, block_d):
    """A descriptor of (B, H, rows, D) for tiles of `block` rows of one head, or None where bulk copies cannot serve."""
    if packed:
        t = t.unsqueeze(0)
    t = t.transpose(1, 2)
    # A dimension of size 1 has any stride. Expanded ones are left to pointers.
    steps = [t.stride(d) if t.shape[d] > 1 else t.shape[-1] for d in range(3)]
    if t.data_ptr() % 16 or any(s <= 0 or s * t.element_size() % 16 for s in steps):
        return None
    return TensorDescriptor(t, list(t.shape), [*steps, 1], [1, 1, block, block_d])


def heads_at_once(heads, group, Sk, D, itemsize):
    """Heads whose keys and values fill 32 MiB: 2 to 10 % better than 16 or 64, H200 causal."""
    return min(max(2**25 // max(Sk * D * itemsize // group, 1), 1), heads)


def on_kernels(q, v):
    """Whether the kernels serve these head dims and this dtype, on devices that have them."""
    return q.dtype != torch.float64 and 0 < q.shape[-1] <= MAX_HEAD_DIM and 0 < v.shape[-1] <= MAX_HEAD_DIM


def empty_results(q, v):
    """(out, lse): of what no sequence holds, 0 and -inf."""
    packed = q.dim() == 3
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    if packed:
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_full(shape, -torch.inf, dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(add_op_namespace_prefix("attention_fwd"), mutates_args=())
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Optional[Tensor], cu_k: Optional[Tensor], pages: Optional[Tensor],
    mask: Optional[Tensor], alibi: Optional[Tensor], sinks: Optional[Tensor], seed: Optional[Tensor],
    max_q: int, max_k: int, scale: float, left: int, right: int, top_left: bool, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log of the sum of exponentials), of (B, S, H, D) tensors or, with cu_q and cu_k, of (T, H, D) ones.

    Row i of a sequence sees keys i + d - left to i + d + right, -1 for no bound, d = 0 if top_left, else Sk - Sq.
    """
    if not on_kernels(q, v):
        return forward_in_chunks(
            q, k, v, cu_q, cu_k, pages, mask, alibi, sinks, seed,
            max_q, max_k, scale, left, right, top_left, softcap, dropout_p,
        )  # fmt: skip
    out, lse = empty_results(q, v)
    packed, device = cu_q is not None, facts(q.device)
    B = cu_q.shape[0] - 1 if packed else q.shape[0]
    if not out.numel() * B * max_q:
        return out, lse
    q, k, v = (unit_last_stride(t) for t in (q, k, v))
    sinks = sinks if sinks is None else sinks.contiguous()
    H, Hk, D, DV = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    block_d, block_dv = (max(next_power_of_2(d), 16) for d in (D, DV))
    folded = fold(scale, softcap, alibi, mask)
    extras = "mask" if mask is not None else "" if folded and seed is None else "more"
    whole = pages is None and k.numel() > 0
    plain = not packed and D == DV and scale > 0 and left < 0 and not softcap
    plain = plain and mask is None and alibi is None and sinks is None and seed is None
    # Below 1024 keys there is little to split. untuned
    few = not packed and D == DV and H // Hk * max_q <= 64 and max_k >= 1024
    few = few and mask is None and seed is None and not (top_left and right >= 0)
    for descriptors in (whole and device.descriptors, False):
        plan = plan_forward(max_q, max(block_d, block_dv), q.element_size(), descriptors, device, plain, few, extras)
        if plan.kind == "decode":
            return _attention_decode.few_queries(q, k, v, alibi, sinks, scale, left, right, softcap)
        if plan.kind == "sm90":
            from . import _attention_fwd_sm90  # and with it Gluon, which nothing else needs

            if _attention_fwd_sm90.forward(q, k, v, out, lse, scale, right, top_left):
                return out, lse
            continue
        if plan.kind == "pointer":
            operands = (q, k, v)
            break
        operands = (
            describe(q, packed, plan.BLOCK_M, block_d), describe(k, packed, plan.BLOCK_N, block_d),
            describe(v, packed, plan.BLOCK_N, block_dv),
        )  # fmt: skip
        if None not in operands:
            break
    tiles = cdiv(max_q, plan.BLOCK_M)
    launch(
        _attention_fwd_kernel,
        (tiles * B * H,),
        q.device,
        (*operands, out, lse, cu_q, cu_k, pages, mask_bytes(mask), alibi, sinks, seed,
         B * H, H, H // Hk, max_q, max_k, tiles, heads_at_once(B * H, H // Hk, max_k, D + DV, q.element_size()),
         1 if pages is None else k.shape[1],
         strides(q, packed), strides(k, packed and pages is None), strides(v, packed and pages is None),
         strides(out, packed), row_strides(lse),
         mask_strides(mask), alibi_strides(alibi), 0 if pages is None else pages.stride(0),
         *options(scale, softcap, left, right, seed, dropout_p), keep_scale(dropout_p)),
        D=D, DV=DV, BLOCK_D=block_d, BLOCK_DV=block_dv, FOLD=folded, TOP_LEFT=top_left,
        PRECISION=precision(q, device), **plan.options(),
    )  # fmt: skip
    return out, lse


def row_strides(t, ndim=2):
    """(batch, head) strides, and with ndim = 3 the row's, of a (B, H, S) tensor or of a packed (H, T) one."""
    if t is None:
        return (0,) * ndim
    return (t.stride() if t.dim() == 3 else (0, *t.stride()))[:ndim]


def mask_bytes(mask):
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def mask_strides(mask):
    """Of a mask that was expanded to (B, H, Sq, Sk), or (B, H, Sk) where it hides the same keys from all queries."""
    if mask is None:
        return (0, 0, 0, 0)
    step = mask.stride()
    return step if step[2] else (*step[:2], step[3])


def alibi_strides(alibi):
    return (0, 0) if alibi is None else alibi.stride() if alibi.dim() == 2 else (0, alibi.stride(0))


@attention_fwd.register_fake
def _(q, k, v, cu_q, cu_k, pages, mask, alibi, sinks, seed, max_q, max_k, scale, left, right, top_left, softcap,
      dropout_p):  # fmt: skip
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=compute_dtype(q))
