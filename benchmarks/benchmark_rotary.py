"""Rotary embedding of queries and keys as models call it, in bfloat16: `kernels benchmark .` times it against torch.

Queries and keys are views of (B, S, H, D), as projections give them. torch is the function of Hugging Face models.
"""

import torch
from kernels.benchmark import Benchmark

# name: (batch, tokens, heads of q, heads of k, head dimension, rotated dimensions)
CASES = {
    "llama3_8b": (2, 8192, 32, 8, 128, 128),
    "qwen3_8b": (2, 8192, 32, 8, 128, 128),
    "pythia_12b": (8, 2048, 40, 40, 128, 32),
    "decode_llama3_8b": (64, 1, 32, 8, 128, 128),
}


def bytes_moved(batch, tokens, heads_q, heads_k, dimension, rotated):
    heads = heads_q + heads_k
    return 2 * batch * tokens * (2 * heads * dimension + 2 * rotated)  # read and write q and k, read cos and sin


def formula(q, k, cos, sin):
    cos, sin, rotated = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]

    def one(x):
        turned, tail = x[..., :rotated], x[..., rotated:]
        half = rotated // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        return torch.cat((turned * cos + swapped * sin, tail), -1)

    return one(q), one(k)


class RotaryBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        B, S, HQ, HK, D, R = CASES[case]
        options = {"device": self.device, "dtype": torch.bfloat16}
        # Uniform to 1: 1 ulp of the result stays below the runner's tolerance of 1e-2.
        self.q, self.k = (torch.rand(B, S, H, D, **options).transpose(1, 2) for H in (HQ, HK))
        frequencies = 10000.0 ** (-torch.arange(0, R, 2, device=self.device) / R)
        angles = torch.arange(S, device=self.device)[:, None] * frequencies
        angles = torch.cat((angles, angles), -1).expand(B, S, R)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.weight = torch.rand(D, **options) / 4

    def apply(self):
        self.out, self.out_k = self.kernel.apply_rotary_pos_emb(self.q, self.k, self.cos, self.sin)

    def expected(self):
        return formula(self.q, self.k, self.cos, self.sin)[0]

    def setup_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_llama3_8b(self):
        self.apply()

    def verify_llama3_8b(self):
        return self.expected()

    def setup_pythia_12b(self):
        self.make("pythia_12b")

    def benchmark_pythia_12b(self):
        self.apply()

    def verify_pythia_12b(self):
        return self.expected()

    def setup_decode_llama3_8b(self):
        self.make("decode_llama3_8b")

    def benchmark_decode_llama3_8b(self):
        self.apply()

    def verify_decode_llama3_8b(self):
        return self.expected()

    def setup_backward_llama3_8b(self):
        self.make("llama3_8b")
        self.q.requires_grad_(), self.k.requires_grad_()
        self.grads = torch.rand_like(self.q), torch.rand_like(self.k)
        self.y = self.kernel.apply_rotary_pos_emb(self.q, self.k, self.cos, self.sin)
        self.y_expected = formula(self.q, self.k, self.cos, self.sin)

    def benchmark_backward_llama3_8b(self):
        self.out, self.out_k = torch.autograd.grad(self.y, (self.q, self.k), self.grads, retain_graph=True)

    def verify_backward_llama3_8b(self):
        return torch.autograd.grad(self.y_expected, (self.q, self.k), self.grads, retain_graph=True)[0]

    def setup_norm_qwen3_8b(self):
        self.make("qwen3_8b")

    def benchmark_norm_qwen3_8b(self):
        self.out, self.out_k = self.kernel.qk_norm_rotary(
            self.q, self.k, self.weight, self.weight, self.cos, self.sin, casting="before_weight"
        )

    def verify_norm_qwen3_8b(self):
        def norm(x):
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)

        return formula(norm(self.q), norm(self.k), self.cos, self.sin)[0]

    def setup_norm_backward_qwen3_8b(self):
        self.make("qwen3_8b")
        self.q.requires_grad_(), self.k.requires_grad_(), self.weight.requires_grad_()
        self.grads = torch.rand_like(self.q) / 8, torch.rand_like(self.k) / 8
        self.y = self.kernel.qk_norm_rotary(self.q, self.k, self.weight, self.weight, self.cos, self.sin)
        norms = (torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-6) for x in (self.q, self.k))
        self.y_expected = formula(*norms, self.cos, self.sin)

    def benchmark_norm_backward_qwen3_8b(self):
        self.out, self.out_k = torch.autograd.grad(self.y, (self.q, self.k), self.grads, retain_graph=True)

    def verify_norm_backward_qwen3_8b(self):
        return torch.autograd.grad(self.y_expected, (self.q, self.k), self.grads, retain_graph=True)[0]
