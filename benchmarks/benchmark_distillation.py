"""Distillation losses at the sizes of models, in bfloat16: `kernels benchmark .` times them and holds them to torch."""

import math

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: (tokens, vocabulary)
CASES = {
    "llama3_8b": (1024, 128256),
    "qwen3": (1024, 151936),
}


def bytes_moved(case, backward=False):
    tokens, vocabulary = CASES[case]
    return 2 * (3 if backward else 4) * tokens * vocabulary  # read both twice; backward: read both, write dx


class DistillationBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        shape = CASES[case]
        # Spread out, so that the largest gradients (of the sum) lie above the runner's tolerance of 1e-2.
        self.teacher = (4 * torch.randn(shape, device=self.device)).bfloat16()
        self.x = (self.teacher + 2 * torch.randn_like(self.teacher)).requires_grad_(requires_grad)

    def logs(self):
        return torch.log_softmax(self.x, -1, dtype=torch.float32), F.log_softmax(self.teacher, -1, dtype=torch.float32)

    def expected_kl(self, reduction="batchmean"):
        return F.kl_div(*self.logs(), reduction=reduction, log_target=True)

    def expected_jsd(self, reduction="batchmean"):
        p, q = self.logs()
        m = torch.logaddexp(p, q) - math.log(2)
        return (F.kl_div(m, p, reduction=reduction, log_target=True)
                + F.kl_div(m, q, reduction=reduction, log_target=True)) / 2  # fmt: skip

    def setup_kl_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_kl_llama3_8b(self):
        self.out = self.kernel.distillation_kl(self.x, self.teacher)

    def verify_kl_llama3_8b(self):
        return self.expected_kl()

    def setup_jsd_qwen3(self):
        self.make("qwen3")

    def benchmark_jsd_qwen3(self):
        self.out = self.kernel.distillation_jsd(self.x, self.teacher)

    def verify_jsd_qwen3(self):
        return self.expected_jsd()

    def setup_forward_backward_kl_llama3_8b(self):
        self.make("llama3_8b", requires_grad=True)

    def benchmark_forward_backward_kl_llama3_8b(self):
        loss = self.kernel.distillation_kl(self.x, self.teacher, reduction="sum")
        (self.out,) = torch.autograd.grad(loss, self.x)

    def verify_forward_backward_kl_llama3_8b(self):
        return torch.autograd.grad(self.expected_kl("sum"), self.x)[0]

    def setup_forward_backward_jsd_qwen3(self):
        self.make("qwen3", requires_grad=True)

    def benchmark_forward_backward_jsd_qwen3(self):
        loss = self.kernel.distillation_jsd(self.x, self.teacher, reduction="sum")
        (self.out,) = torch.autograd.grad(loss, self.x)

    def verify_forward_backward_jsd_qwen3(self):
        return torch.autograd.grad(self.expected_jsd("sum"), self.x)[0]
