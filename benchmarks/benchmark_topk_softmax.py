"""The router of mixtures of experts, from logits in bfloat16, timed and held against torch by `kernels benchmark .`"""

import torch
from kernels.benchmark import Benchmark

# name: (tokens, experts, chosen, renormalised)
CASES = {
    "mixtral_8x7b": (131072, 8, 2, True),
    "qwen3_30b_a3b": (131072, 128, 8, True),
    "olmoe_1b_7b": (131072, 64, 8, False),
}


def bytes_moved(case, backward=False):
    tokens, experts, chosen, _ = CASES[case]
    # Read the logits, write weights in float32 and indices; backward: read all three, write the logits' gradient.
    return tokens * (2 * experts * (2 if backward else 1) + (4 + 8) * chosen)


class TopkSoftmaxBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        tokens, experts, self.k, self.renormalize = CASES[case]
        self.x = torch.randn(tokens, experts, device=self.device).bfloat16().requires_grad_(requires_grad)

    def ours(self):
        return self.kernel.topk_softmax(self.x, self.k, renormalize=self.renormalize, dtype=torch.float32)[0]

    def expected(self):
        weights, _ = torch.topk(torch.softmax(self.x, -1, dtype=torch.float32), self.k, -1)
        return weights / weights.sum(-1, keepdim=True) if self.renormalize else weights

    def setup_mixtral_8x7b(self):
        self.make("mixtral_8x7b")

    def benchmark_mixtral_8x7b(self):
        self.out = self.ours()

    def verify_mixtral_8x7b(self):
        return self.expected()

    def setup_qwen3_30b_a3b(self):
        self.make("qwen3_30b_a3b")

    def benchmark_qwen3_30b_a3b(self):
        self.out = self.ours()

    def verify_qwen3_30b_a3b(self):
        return self.expected()

    def setup_olmoe_1b_7b(self):
        self.make("olmoe_1b_7b")

    def benchmark_olmoe_1b_7b(self):
        self.out = self.ours()

    def verify_olmoe_1b_7b(self):
        return self.expected()

    def setup_backward_olmoe_1b_7b(self):
        self.make("olmoe_1b_7b", requires_grad=True)
        # Where two logits are equal torch may choose the other one: their gradients differ by less than the tolerance.
        self.dy = torch.randn(self.x.shape[0], self.k, device=self.device) / 512
        self.y, self.y_torch = self.ours(), self.expected()

    def benchmark_backward_olmoe_1b_7b(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_olmoe_1b_7b(self):
        return torch.autograd.grad(self.y_torch, self.x, self.dy, retain_graph=True)[0]
