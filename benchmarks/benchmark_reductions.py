"""Reductions at the sizes of models, in bfloat16: `kernels benchmark .` times them and holds them against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (shape, dim)
CASES = {
    "llama3_8b_bias_gradient": ((16384, 4096), 0),  # of one layer, over 16384 tokens: columns are summed
    "llama3_8b_logits": ((2048, 128256), -1),
    "sdxl_channels": ((16, 320, 128, 128), (0, 2, 3)),  # statistics of each channel
    "llama3_8b_gradient_norm": ((128256, 4096), None),  # the embedding's: one number
    "qwen3_moe_router": ((131072, 128), -1),
    "mamba2_2_7b_steps": ((8, 4096, 80), 1),  # running sums over the sequence, for each head
}


def bytes_moved(case, backward=False):
    elements = torch.Size(CASES[case][0]).numel()
    if case == "mamba2_2_7b_steps":
        return (4 + 4) * elements  # read x, write y, in float32
    return 2 * (2 if backward else 1) * elements  # read x; backward: read x, write dx; results are small beside it


class ReductionsBenchmark(Benchmark):
    seed = 0

    def make(self, case, scale=1.0, dtype=torch.bfloat16, requires_grad=False):
        """scale: such that results are near 1, whose last place stays below the runner's tolerance of 1e-2."""
        x = torch.rand(CASES[case][0], device=self.device).mul_(scale)
        self.x = x.to(dtype).requires_grad_(requires_grad)
        self.f = self.kernel.reductions

    def setup_sum_llama3_8b_bias_gradient(self):
        self.make("llama3_8b_bias_gradient", 2.0**-14)

    def benchmark_sum_llama3_8b_bias_gradient(self):
        self.out = self.f.sum(self.x, 0)

    def verify_sum_llama3_8b_bias_gradient(self):
        return self.x.sum(0)

    def setup_amax_llama3_8b_logits(self):
        self.make("llama3_8b_logits")

    def benchmark_amax_llama3_8b_logits(self):
        self.out = self.f.amax(self.x, -1)

    def verify_amax_llama3_8b_logits(self):
        return self.x.amax(-1)

    def setup_argmax_llama3_8b_logits(self):
        self.make("llama3_8b_logits")
        self.x.fill_(0.0)[torch.arange(2048), torch.arange(2048) * 62] = 1.0  # no ties: either index would be right

    def benchmark_argmax_llama3_8b_logits(self):
        self.out = self.f.argmax(self.x, -1)

    def verify_argmax_llama3_8b_logits(self):
        return self.x.argmax(-1)

    def setup_logsumexp_llama3_8b_logits(self):
        self.make("llama3_8b_logits")
        self.x -= 11.5

    def benchmark_logsumexp_llama3_8b_logits(self):
        self.out = self.f.logsumexp(self.x, -1)

    def verify_logsumexp_llama3_8b_logits(self):
        return self.x.logsumexp(-1)

    def setup_var_sdxl_channels(self):
        self.make("sdxl_channels")

    def benchmark_var_sdxl_channels(self):
        self.out = self.f.var(self.x, (0, 2, 3))

    def verify_var_sdxl_channels(self):
        return self.x.var((0, 2, 3))

    def setup_norm_llama3_8b_gradient_norm(self):
        self.make("llama3_8b_gradient_norm", 2.0**-14)

    def benchmark_norm_llama3_8b_gradient_norm(self):
        self.out = self.f.vector_norm(self.x)

    def verify_norm_llama3_8b_gradient_norm(self):
        return torch.linalg.vector_norm(self.x)

    def setup_mean_qwen3_moe_router(self):
        self.make("qwen3_moe_router")

    def benchmark_mean_qwen3_moe_router(self):
        self.out = self.f.mean(self.x, -1)

    def verify_mean_qwen3_moe_router(self):
        return self.x.mean(-1)

    def setup_cumsum_mamba2_2_7b_steps(self):
        self.make("mamba2_2_7b_steps", 2.0**-11, torch.float32)

    def benchmark_cumsum_mamba2_2_7b_steps(self):
        self.out = self.f.cumsum(self.x, 1)

    def verify_cumsum_mamba2_2_7b_steps(self):
        return self.x.cumsum(1)

    def setup_backward_logsumexp_llama3_8b_logits(self):
        self.make("llama3_8b_logits", requires_grad=True)
        self.dy = torch.randn(2048, device=self.device, dtype=torch.bfloat16)
        self.y, self.y_torch = self.f.logsumexp(self.x, -1), self.x.logsumexp(-1)

    def benchmark_backward_logsumexp_llama3_8b_logits(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_logsumexp_llama3_8b_logits(self):
        return torch.autograd.grad(self.y_torch, self.x, self.dy, retain_graph=True)[0]
