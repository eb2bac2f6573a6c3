"""Grouped products at the sizes of mixtures of experts, in bfloat16: `kernels benchmark .` times them."""

import torch
from kernels.benchmark import Benchmark

# name: tokens times experts that each is given to, experts, K, N
CASES = {
    "mixtral_8x7b_up": (16384, 8, 4096, 14336),
    "mixtral_8x7b_down": (16384, 8, 14336, 4096),
    "qwen3_30b_a3b_up": (65536, 128, 2048, 1536),
    "qwen3_30b_a3b_decode": (512, 128, 2048, 1536),
}


def flops(case):
    T, _, K, N = CASES[case]
    return 2 * T * K * N


class GroupedMmBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        T, G, K, N = CASES[case]
        self.x = torch.randn(T, K, device=self.device).bfloat16()
        self.w = (torch.randn(G, N, K, device=self.device) * (0.2 * K**-0.5)).bfloat16()  # results below 1
        # Experts are popular to different degrees.
        share = torch.rand(G, device=self.device, dtype=torch.float64) + 0.25
        self.offs = (share.cumsum(0) / share.sum() * T).round().int()

    def multiply(self):
        self.out = self.kernel.grouped_mm(self.x, self.w.mT, offs=self.offs)

    def expected(self):
        return torch._grouped_mm(self.x, self.w.mT, self.offs)

    def setup_mixtral_8x7b_up(self):
        self.make("mixtral_8x7b_up")

    def benchmark_mixtral_8x7b_up(self):
        self.multiply()

    def verify_mixtral_8x7b_up(self):
        return self.expected()

    def setup_mixtral_8x7b_down(self):
        self.make("mixtral_8x7b_down")

    def benchmark_mixtral_8x7b_down(self):
        self.multiply()

    def verify_mixtral_8x7b_down(self):
        return self.expected()

    def setup_qwen3_30b_a3b_up(self):
        self.make("qwen3_30b_a3b_up")

    def benchmark_qwen3_30b_a3b_up(self):
        self.multiply()

    def verify_qwen3_30b_a3b_up(self):
        return self.expected()

    def setup_qwen3_30b_a3b_decode(self):
        self.make("qwen3_30b_a3b_decode")

    def benchmark_qwen3_30b_a3b_decode(self):
        self.multiply()

    def verify_qwen3_30b_a3b_decode(self):
        return self.expected()

    def setup_weight_gradient_mixtral_8x7b(self):
        self.make("mixtral_8x7b_down")
        T, _, K, N = CASES["mixtral_8x7b_down"]
        self.dy = (torch.randn(T, N, device=self.device) * 0.005).bfloat16()

    def benchmark_weight_gradient_mixtral_8x7b(self):
        self.out = self.kernel.grouped_mm(self.x.t(), self.dy, offs=self.offs)

    def verify_weight_gradient_mixtral_8x7b(self):
        return torch._grouped_mm(self.x.t(), self.dy, self.offs)
