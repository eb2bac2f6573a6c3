"""Quantisation to float8 and products of float8 matrices, at the sizes of models: `kernels benchmark .` times both."""

import torch
from kernels.benchmark import Benchmark

# name: M, N, K
CASES = {
    "llama3_8b_qkv": (4096, 6144, 4096),
    "llama3_8b_up": (8192, 14336, 4096),
    "llama3_8b_down": (8192, 4096, 14336),
    "llama3_8b_decode": (16, 14336, 4096),
}


def flops(case):
    M, N, K = CASES[case]
    return 2 * M * N * K


def bytes_moved(case, scaling="row"):
    M, _, K = CASES[case]
    return M * K * (2 + 1 + (2 if scaling == "tensor" else 0))  # bfloat16 read, twice for the whole tensor's scale


class ScaledMatmulBenchmark(Benchmark):
    seed = 0

    def make(self, case, scaling="tensor"):
        M, N, K = CASES[case]
        self.x = torch.randn(M, K, device=self.device).bfloat16()
        w = torch.randn(N, K, device=self.device).bfloat16() * (0.2 * K**-0.5)  # results below 1
        self.a, self.scale_a = self.kernel.quantize_fp8(self.x, scaling=scaling)
        self.b, self.scale_b = self.kernel.quantize_fp8(w, scaling=scaling)
        self.options = {"out_dtype": torch.bfloat16}

    def multiply(self, fast_accum=False):
        scale_b = self.scale_b.t() if self.scale_b.dim() == 2 else self.scale_b
        self.out = self.kernel.scaled_matmul(
            self.a, self.b.t(), self.scale_a, scale_b, fast_accum=fast_accum, **self.options
        )

    def expected(self, use_fast_accum=False):
        scale_b = self.scale_b.t() if self.scale_b.dim() == 2 else self.scale_b
        return torch._scaled_mm(
            self.a, self.b.t(), self.scale_a, scale_b, use_fast_accum=use_fast_accum, **self.options
        )

    def setup_llama3_8b_qkv(self):
        self.make("llama3_8b_qkv")

    def benchmark_llama3_8b_qkv(self):
        self.multiply()

    def verify_llama3_8b_qkv(self):
        return self.expected()

    def setup_llama3_8b_up(self):
        self.make("llama3_8b_up")

    def benchmark_llama3_8b_up(self):
        self.multiply()

    def verify_llama3_8b_up(self):
        return self.expected()

    def setup_llama3_8b_up_fast(self):
        self.make("llama3_8b_up")

    def benchmark_llama3_8b_up_fast(self):
        self.multiply(fast_accum=True)

    def verify_llama3_8b_up_fast(self):
        return self.expected(use_fast_accum=True)

    def setup_llama3_8b_down_rows(self):
        self.make("llama3_8b_down", "row")

    def benchmark_llama3_8b_down_rows(self):
        self.multiply()

    def verify_llama3_8b_down_rows(self):
        return self.expected()

    def setup_llama3_8b_decode(self):
        self.make("llama3_8b_decode")

    def benchmark_llama3_8b_decode(self):
        self.multiply(fast_accum=True)

    def verify_llama3_8b_decode(self):
        return self.expected(use_fast_accum=True)

    def setup_quantize_rows_llama3_8b_down(self):
        self.make("llama3_8b_down")

    def benchmark_quantize_rows_llama3_8b_down(self):
        self.q, self.out = self.kernel.quantize_fp8(self.x, scaling="row")

    def verify_quantize_rows_llama3_8b_down(self):
        scale = self.x.abs().amax(1, keepdim=True).float() / 448
        self.expected_q = (self.x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return scale
