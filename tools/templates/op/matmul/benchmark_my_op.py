"""my_op at sizes of models, in bfloat16, held against torch, for `kernels benchmark .`."""

import torch
from kernels.benchmark import Benchmark

CASES = {"square": (4096, 4096, 4096), "mlp": (8192, 14336, 4096)}  # M, N, K


def flops(M, N, K):
    return 2 * M * N * K  # a multiplication and an addition for each


class MyOpBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        M, N, K = CASES[case]
        self.a = torch.randn(M, K, device=self.device, dtype=torch.bfloat16)
        # Small, so that 1 ulp of the result stays below the runner's tolerance of 1e-2.
        self.b = torch.randn(K, N, device=self.device, dtype=torch.bfloat16) * (0.2 * K**-0.5)

    def run(self):
        self.out = self.kernel.my_op(self.a, self.b)

    def expected(self):
        return self.a @ self.b

    def setup_square(self):
        self.make("square")

    def benchmark_square(self):
        self.run()

    def verify_square(self):
        return self.expected()

    def setup_mlp(self):
        self.make("mlp")

    def benchmark_mlp(self):
        self.run()

    def verify_mlp(self):
        return self.expected()
