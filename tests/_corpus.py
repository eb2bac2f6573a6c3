"""Right kernels as text, in the manner of Triton's tutorials: tests of the tools plant mistakes in them."""

HEAD = """
import torch
import triton
import triton.language as tl
"""

ADD = """
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK_SIZE=1024)
    return out
"""

SOFTMAX = """
@triton.jit
def softmax_kernel(x_ptr, y_ptr, stride_x, stride_n, n_cols, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_cols
    x = tl.load(x_ptr + row * stride_x + offsets * stride_n, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * n_cols + offsets, y, mask=mask)


def softmax(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(max(x.shape[1], 1))
    num_warps = 4 if block <= 2048 else 16
    if y.numel():
        softmax_kernel[(x.shape[0],)](x, y, *x.stride(), x.shape[1], BLOCK_SIZE=block, num_warps=num_warps)
    return y
"""

LAYER_NORM = """
@triton.jit
def centred(x, mean, mask):
    return tl.where(mask, x - mean, 0.0)


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, y_ptr, stride, N, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    d = centred(x, mean, mask)
    rstd = tl.rsqrt(tl.sum(d * d, axis=0) / N + eps)
    w = tl.load(w_ptr + cols, mask=mask)
    tl.store(y_ptr + row * N + cols, d * rstd * w, mask=mask)


def layer_norm(x, w, eps=1e-5):
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty_like(x)
    (M, N), block = x.shape, triton.next_power_of_2(max(x.shape[1], 1))
    if y.numel():
        layer_norm_kernel[(M,)](x, w, y, x.stride(0), N, eps, BLOCK_N=block)
    return y
"""

# Rows that are looped over, in tiles of two dimensions, with a largest size beside the sum.
LOOPED = """
@triton.jit
def squares_kernel(x_ptr, sum_ptr, size_ptr, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    size = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + offs_n
        mask = (offs_m < M)[:, None] & (cols < N)[None, :]
        ptrs = x_ptr + offs_m[:, None] * stride_m + cols[None, :] * stride_n
        x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        total += x * x
        size = tl.maximum(size, tl.abs(x))
    tl.store(sum_ptr + offs_m, tl.sum(total, axis=1), mask=offs_m < M)
    tl.store(size_ptr + offs_m, tl.max(size, axis=1), mask=offs_m < M)
"""

MATMUL = """
def configs():
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_stages=s, num_warps=w)
        for m, n, k, s, w in ((128, 128, 32, 3, 8), (64, 64, 32, 3, 4))
    ]


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8}, num_stages=3, num_warps=8),
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8}, num_stages=4, num_warps=4),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    width = GROUP_M * tiles_n
    first = pid // width * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    pid_m = first + pid % width % rows
    pid_n = pid % width // rows
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        mask_k = offs_k < K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def matmul(a, b):
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        grid = lambda meta: (triton.cdiv(c.shape[0], meta["BLOCK_M"]) * triton.cdiv(c.shape[1], meta["BLOCK_N"]),)
        matmul_kernel[grid](
            a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), *c.stride()
        )
    return c
"""

# The first stage of a sum over everything: its block may be tuned, since each program writes what it has summed.
PARTS = """
@triton.autotune(
    configs=[triton.Config({"BLOCK": 1024}), triton.Config({"BLOCK": 4096}, num_warps=8)], key=["n_elements"]
)
@triton.jit
def parts_kernel(x_ptr, part_ptr, n_elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0)
    tl.store(part_ptr + pid, tl.sum(x.to(tl.float32), axis=0))
"""

# Keys one block at a time, with a running maximum: the first row of scores may be all -inf.
ONLINE = """
@triton.jit
def online_kernel(q_ptr, k_ptr, v_ptr, o_ptr, S, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d[None, :], mask=(offs_m < S)[:, None], other=0.0)
    peak = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, S, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < S
        k = tl.load(k_ptr + offs_d[:, None] + offs_n[None, :] * D, mask=mask_n[None, :], other=0.0)
        v = tl.load(v_ptr + offs_n[:, None] * D + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        scores = tl.where(mask_n[None, :], tl.dot(q, k) * scale, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        p = tl.exp(scores - higher[:, None])
        fade = tl.exp(peak - higher)
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        peak = higher
    out = o_ptr + offs_m[:, None] * D + offs_d[None, :]
    tl.store(out, acc / total[:, None], mask=(offs_m < S)[:, None])
"""

OP = """
from ._ops import add_op_namespace_prefix


@torch.library.custom_op(add_op_namespace_prefix("twice_fwd"), mutates_args=())
def twice_fwd(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice_fwd.register_fake
def _(x):
    return torch.empty_like(x)


HAS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16)


def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


if __name__ == "__main__":
    print(twice_fwd(torch.ones(2, device="cuda")))
"""

RIGHT = {
    "add": ADD, "softmax": SOFTMAX, "layer_norm": LAYER_NORM, "looped": LOOPED, "matmul": MATMUL, "parts": PARTS,
    "online": ONLINE, "op": OP,
}  # fmt: skip
