"""Attention at the sizes of models, in bfloat16, forward and backward: `kernels benchmark .` times them."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: (batch, heads of queries, heads of keys, tokens, head dimension, causal)
CASES = {
    "llama2_7b": (4, 32, 32, 4096, 128, True),
    "llama3_8b": (2, 32, 8, 8192, 128, True),
    "vit_huge": (64, 16, 16, 257, 80, False),
    "gpt2_xl": (8, 25, 25, 1024, 64, True),
}


def flops(case, backward=False):
    B, H, _, S, D, causal = CASES[case]
    return 4 * B * H * S * S * D * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)


class AttentionBenchmark(Benchmark):
    seed = 0

    def make(self, case, backward=False):
        B, H, Hk, S, D, self.causal = CASES[case]
        shapes = (B, S, H, D), (B, S, Hk, D), (B, S, Hk, D)
        self.q, self.k, self.v = (torch.randn(s, device=self.device).bfloat16() for s in shapes)
        self.v *= 0.25  # results below 1
        if backward:
            self.tensors = [t.requires_grad_() for t in (self.q, self.k, self.v)]
            self.dout = 0.1 * torch.randn_like(self.q)
            self.result, self.result_torch = (
                self.kernel.flash_attn_func(*self.tensors, causal=self.causal),
                self.torchs(),
            )

    def attend(self):
        self.out = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=self.causal)

    def torchs(self):
        q, k, v = (t.transpose(1, 2) for t in (self.q, self.k, self.v))
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa).transpose(1, 2)

    def backward(self, result):
        return torch.autograd.grad(result, self.tensors, self.dout, retain_graph=True)[0]

    def setup_llama2_7b(self):
        self.make("llama2_7b")

    def benchmark_llama2_7b(self):
        self.attend()

    def verify_llama2_7b(self):
        return self.torchs()

    def setup_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_llama3_8b(self):
        self.attend()

    def verify_llama3_8b(self):
        return self.torchs()

    def setup_vit_huge(self):
        self.make("vit_huge")

    def benchmark_vit_huge(self):
        self.attend()

    def verify_vit_huge(self):
        return self.torchs()

    def setup_gpt2_xl(self):
        self.make("gpt2_xl")

    def benchmark_gpt2_xl(self):
        self.attend()

    def verify_gpt2_xl(self):
        return self.torchs()

    def setup_backward_llama2_7b(self):
        self.make("llama2_7b", backward=True)

    def benchmark_backward_llama2_7b(self):
        self.out = self.backward(self.result)

    def verify_backward_llama2_7b(self):
        return self.backward(self.result_torch)

    def setup_backward_gpt2_xl(self):
        self.make("gpt2_xl", backward=True)

    def benchmark_backward_gpt2_xl(self):
        self.out = self.backward(self.result)

    def verify_backward_gpt2_xl(self):
        return self.backward(self.result_torch)
