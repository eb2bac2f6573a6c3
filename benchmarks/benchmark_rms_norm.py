"""RMSNorm at the sizes of models, in bfloat16: `kernels benchmark .` times it and holds it against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (rows, N)
CASES = {
    "llama3_8b": (16384, 4096),
    "qwen3_head": (524288, 128),  # the norm of each query head
    "llama3_405b": (4096, 16384),
}


def bytes_moved(rows, N):
    return 2 * (2 * rows * N + N)  # read x and the weight, write y


class RMSNormBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        rows, N = CASES[case]
        self.x = torch.randn(rows, N, device=self.device, dtype=torch.bfloat16)
        self.residual = torch.randn_like(self.x)
        # Small weights: 1 ulp of the result stays below the runner's tolerance of 1e-2.
        self.weight = torch.rand(N, device=self.device, dtype=torch.bfloat16) / 4

    def expected(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    def setup_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_llama3_8b(self):
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_llama3_8b(self):
        return self.expected(self.x)

    def setup_qwen3_head(self):
        self.make("qwen3_head")

    def benchmark_qwen3_head(self):
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_qwen3_head(self):
        return self.expected(self.x)

    def setup_llama3_405b(self):
        self.make("llama3_405b")

    def benchmark_llama3_405b(self):
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_llama3_405b(self):
        return self.expected(self.x)

    def setup_add_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_add_llama3_8b(self):
        self.out, self.total = self.kernel.add_rms_norm(self.x, self.residual, self.weight)

    def verify_add_llama3_8b(self):
        return self.expected(self.x + self.residual)

    def setup_backward_llama3_8b(self):
        self.make("llama3_8b")
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x) / 4
        self.y, self.y_expected = self.kernel.rms_norm(self.x, self.weight), self.expected(self.x)

    def benchmark_backward_llama3_8b(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_llama3_8b(self):
        (dx,) = torch.autograd.grad(self.y_expected, self.x, self.dy, retain_graph=True)
        return dx
