"""Gated activations at the sizes of models, in bfloat16, timed and held against torch by `kernels benchmark .`"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: (tokens, N)
CASES = {
    "llama3_8b": (9362, 14336),
    "gemma_7b": (4096, 24576),
    "sdxl": (16384, 5120),
    "gpt_oss": (32768, 2880),
    "qwen3_30b_expert": (65536, 768),
}


def bytes_moved(tokens, N):
    return 2 * 3 * tokens * N  # read gate and up, write y


def gpt_oss(x):
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class GatedBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        tokens, N = CASES[case]
        # Small values: a few ulps of the result stay below the runner's tolerance of 1e-2.
        self.x = torch.randn(tokens, 2 * N, device=self.device, dtype=torch.bfloat16) / 8
        self.first, self.second = self.x.chunk(2, -1)

    def setup_silu_and_mul_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_silu_and_mul_llama3_8b(self):
        self.out = self.kernel.silu_and_mul(self.x)

    def verify_silu_and_mul_llama3_8b(self):
        return F.silu(self.first) * self.second

    def setup_gelu_tanh_and_mul_gemma_7b(self):
        self.make("gemma_7b")

    def benchmark_gelu_tanh_and_mul_gemma_7b(self):
        self.out = self.kernel.gelu_tanh_and_mul(self.x)

    def verify_gelu_tanh_and_mul_gemma_7b(self):
        return F.gelu(self.first, approximate="tanh") * self.second

    def setup_mul_and_gelu_sdxl(self):
        self.make("sdxl")

    def benchmark_mul_and_gelu_sdxl(self):
        self.out = self.kernel.mul_and_gelu(self.x)

    def verify_mul_and_gelu_sdxl(self):
        return self.first * F.gelu(self.second)

    def setup_gpt_oss(self):
        self.make("gpt_oss")

    def benchmark_gpt_oss(self):
        self.out = self.kernel.gated(self.x, "silu", interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0)

    def verify_gpt_oss(self):
        return gpt_oss(self.x)

    def setup_silu_and_mul_qwen3_30b_expert(self):
        self.make("qwen3_30b_expert")

    def benchmark_silu_and_mul_qwen3_30b_expert(self):
        self.out = self.kernel.silu_and_mul(self.x)

    def verify_silu_and_mul_qwen3_30b_expert(self):
        return F.silu(self.first) * self.second

    def setup_swiglu_llama3_8b(self):
        self.make("llama3_8b")
        self.gate, self.up = self.first.contiguous(), self.second.contiguous()

    def benchmark_swiglu_llama3_8b(self):
        self.out = self.kernel.swiglu(self.gate, self.up)

    def verify_swiglu_llama3_8b(self):
        return F.silu(self.gate) * self.up

    def setup_silu_and_mul_backward_llama3_8b(self):
        self.make("llama3_8b")
        self.x.requires_grad_()
        first, second = self.x.chunk(2, -1)
        self.y, self.y_expected = self.kernel.silu_and_mul(self.x), F.silu(first) * second
        self.dy = torch.randn_like(self.y) / 4

    def benchmark_silu_and_mul_backward_llama3_8b(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_silu_and_mul_backward_llama3_8b(self):
        (dx,) = torch.autograd.grad(self.y_expected, self.x, self.dy, retain_graph=True)
        return dx
