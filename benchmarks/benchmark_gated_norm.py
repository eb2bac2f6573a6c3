"""Gated RMSNorm at the sizes of models, in bfloat16: `kernels benchmark .` times it and holds it against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (rows, N)
CASES = {
    "qwen3_next": (262144, 128),  # each head of 8192 tokens; norm, then gate
    "nemotron_h": (8192, 8192),  # gate, then norm of groups of 1024
}


def bytes_moved(rows, N):
    return 2 * (3 * rows * N + N)  # read x, the gate and the weight, write y


class GatedNormBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        rows, N = CASES[case]
        self.x = torch.randn(rows, N, device=self.device, dtype=torch.bfloat16)
        self.gate = torch.randn_like(self.x)
        # Small weights: 1 ulp of the result stays below the runner's tolerance of 1e-2.
        self.weight = torch.rand(N, device=self.device, dtype=torch.bfloat16) / 16

    def before(self):
        y = torch.nn.functional.rms_norm(self.x, self.weight.shape, self.weight, 1e-6)
        return y * torch.nn.functional.silu(self.gate)

    def after(self):
        h = (self.x * torch.nn.functional.silu(self.gate)).unflatten(-1, (-1, 1024))
        return torch.nn.functional.rms_norm(h, (1024,), eps=1e-6).flatten(-2) * self.weight

    def setup_qwen3_next(self):
        self.make("qwen3_next")

    def benchmark_qwen3_next(self):
        self.out = self.kernel.rms_norm_gated(self.x, self.gate, self.weight)

    def verify_qwen3_next(self):
        return self.before()

    def setup_nemotron_h(self):
        self.make("nemotron_h")

    def benchmark_nemotron_h(self):
        self.out = self.kernel.rms_norm_gated(self.x, self.gate, self.weight, norm_before_gate=False, group_size=1024)

    def verify_nemotron_h(self):
        return self.after()

    def setup_backward_qwen3_next(self):
        self.make("qwen3_next")
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.y, self.y_expected = self.kernel.rms_norm_gated(self.x, self.gate, self.weight), self.before()

    def benchmark_backward_qwen3_next(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_qwen3_next(self):
        (dx,) = torch.autograd.grad(self.y_expected, self.x, self.dy, retain_graph=True)
        return dx
