"""Masked softmax at the sizes of attention, in bfloat16, timed and held against torch by `kernels benchmark .`"""

import torch
from kernels.benchmark import Benchmark

# name: (sequences, heads, queries, keys)
CASES = {
    "bert_large_padded": (32, 16, 512, 512),  # a bool mask of the keys
    "gpt2_xl_causal": (8, 25, 1024, 1024),
    "t5_large_bias": (16, 16, 512, 512),  # an added bias of (heads, queries, keys)
}


def bytes_moved(case, backward=False):
    elements = torch.Size(CASES[case]).numel()
    if case == "gpt2_xl_causal" and not backward:
        return 2 * elements * 3 // 2  # read half of x, write y
    return 2 * (3 if backward else 2) * elements  # masks broadcast: they stay in the cache


class MaskedSoftmaxBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        B, H, S, N = CASES[case]
        # Spread out, so that probabilities are not all below the runner's tolerance of 1e-2.
        self.x = (4 * torch.randn(B, H, S, N, device=self.device)).bfloat16().requires_grad_(requires_grad)
        self.keys = (
            torch.arange(N, device=self.device) < N - 8 * torch.arange(B, device=self.device)[:, None, None, None]
        )
        self.seen = torch.ones(S, N, dtype=torch.bool, device=self.device).tril()
        self.bias = torch.randn(H, S, N, device=self.device, dtype=torch.bfloat16)

    def setup_bert_large_padded(self):
        self.make("bert_large_padded")

    def benchmark_bert_large_padded(self):
        self.out = self.kernel.masked_softmax(self.x, self.keys, scale=0.5)

    def verify_bert_large_padded(self):
        return (self.x * 0.5).masked_fill(~self.keys, -torch.inf).softmax(-1)

    def setup_gpt2_xl_causal(self):
        self.make("gpt2_xl_causal")

    def benchmark_gpt2_xl_causal(self):
        self.out = self.kernel.masked_softmax(self.x, scale=0.5, causal=True)

    def verify_gpt2_xl_causal(self):
        return (self.x * 0.5).masked_fill(~self.seen, -torch.inf).softmax(-1)

    def setup_t5_large_bias(self):
        self.make("t5_large_bias")

    def benchmark_t5_large_bias(self):
        self.out = self.kernel.masked_softmax(self.x, self.bias)

    def verify_t5_large_bias(self):
        # In float32: torch would round x + bias to bfloat16 first, which may be off by more than the tolerance.
        return (self.x.float() + self.bias).softmax(-1).bfloat16()

    def setup_backward_bert_large_padded(self):
        self.make("bert_large_padded", requires_grad=True)
        self.dy = torch.randn_like(self.x)
        self.y = self.kernel.masked_softmax(self.x, self.keys, scale=0.5)
        self.y_torch = self.verify_bert_large_padded()

    def benchmark_backward_bert_large_padded(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_bert_large_padded(self):
        return torch.autograd.grad(self.y_torch, self.x, self.dy, retain_graph=True)[0]
