"""Matrix products of models' layers in bfloat16, with what follows them: `kernels benchmark .` times both ways.

Plans for other shapes are searched by `python tools/tune.py`.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: rows, outputs, inputs of the layer
CASES = {
    "llama3_8b_q_proj": (4096, 4096, 4096),
    "llama3_8b_up_proj": (8192, 14336, 4096),
    "llama3_8b_down_proj": (8192, 4096, 14336),
    "llama3_8b_decode": (1, 4096, 4096),
    "llama3_8b_decode_16": (16, 4096, 4096),
    "llama3_8b_decode_64": (64, 14336, 4096),
    "bert_large_up_proj": (16384, 4096, 1024),
    "odd": (1823, 781, 513),
}


def flops(case, products=1):
    M, N, K = CASES[case]
    return 2 * M * N * K * products


class MatmulBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        M, N, K = CASES[case]
        self.x = torch.randn(M, K, device=self.device).bfloat16()
        # Results of about 0.3, so that 1 ulp of them stays below the runner's tolerance of 1e-2.
        scale = 0.3 * K**-0.5
        self.w, self.up = ((scale * torch.randn(N, K, device=self.device)).bfloat16() for _ in range(2))
        self.b = (0.1 * torch.randn(N, device=self.device)).bfloat16()

    def setup_linear_llama3_8b_q_proj(self):
        self.make("llama3_8b_q_proj")

    def benchmark_linear_llama3_8b_q_proj(self):
        self.out = self.kernel.linear(self.x, self.w)

    def verify_linear_llama3_8b_q_proj(self):
        return F.linear(self.x, self.w)

    def setup_linear_llama3_8b_down_proj(self):
        self.make("llama3_8b_down_proj")

    def benchmark_linear_llama3_8b_down_proj(self):
        self.out = self.kernel.linear(self.x, self.w)

    def verify_linear_llama3_8b_down_proj(self):
        return F.linear(self.x, self.w)

    def setup_linear_decode(self):
        self.make("llama3_8b_decode")

    def benchmark_linear_decode(self):
        self.out = self.kernel.linear(self.x, self.w)

    def verify_linear_decode(self):
        return F.linear(self.x, self.w)

    def setup_linear_decode_16(self):
        self.make("llama3_8b_decode_16")

    def benchmark_linear_decode_16(self):
        self.out = self.kernel.linear(self.x, self.w)

    def verify_linear_decode_16(self):
        return F.linear(self.x, self.w)

    def setup_linear_odd(self):
        self.make("odd")

    def benchmark_linear_odd(self):
        self.out = self.kernel.linear(self.x, self.w)

    def verify_linear_odd(self):
        return F.linear(self.x, self.w)

    def setup_linear_gelu_bert_large(self):
        self.make("bert_large_up_proj")

    def benchmark_linear_gelu_bert_large(self):
        self.out = self.kernel.linear(self.x, self.w, self.b, activation="gelu")

    def verify_linear_gelu_bert_large(self):
        return F.gelu(F.linear(self.x, self.w, self.b))

    def setup_gated_linear_llama3_8b(self):
        self.make("llama3_8b_up_proj")

    def benchmark_gated_linear_llama3_8b(self):
        self.out = self.kernel.gated_linear(self.x, self.w, self.up)

    def verify_gated_linear_llama3_8b(self):
        return F.silu(F.linear(self.x, self.w)) * F.linear(self.x, self.up)

    def setup_gated_linear_decode_64(self):
        self.make("llama3_8b_decode_64")

    def benchmark_gated_linear_decode_64(self):
        self.out = self.kernel.gated_linear(self.x, self.w, self.up)

    def verify_gated_linear_decode_64(self):
        return F.silu(F.linear(self.x, self.w)) * F.linear(self.x, self.up)

    def setup_matmul_batched(self):
        self.a = torch.randn(128, 1024, 128, device=self.device).bfloat16()
        self.m = (0.3 * 128**-0.5 * torch.randn(128, 128, 1024, device=self.device)).bfloat16()

    def benchmark_matmul_batched(self):
        self.out = self.kernel.matmul(self.a, self.m)

    def verify_matmul_batched(self):
        return torch.matmul(self.a, self.m)
