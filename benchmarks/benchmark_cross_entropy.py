"""Cross-entropy at the sizes of models, in bfloat16: `kernels benchmark .` times it and holds it against torch."""

import math

import torch
from kernels.benchmark import Benchmark

# name: shape of the logits; the classes are dimension 1
CASES = {
    "llama2_7b": (8192, 32000),
    "llama3_8b": (2048, 128256),
    "gemma3": (1024, 262144),
    "segformer": (8, 150, 128, 128),  # 150 classes of each pixel
}


def bytes_moved(case, backward=False):
    elements = torch.Size(CASES[case]).numel()
    return 2 * (2 if backward else 1) * elements  # read x; backward: read x, write dx


class CrossEntropyBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        shape = CASES[case]
        # Every label with about half the probability: torch's bfloat16 loss is near log(2), its 1 ulp below the
        # runner's tolerance of 1e-2, and the gradients (of the sum) are near 1/2, well above it.
        self.x = torch.randn(shape, device=self.device).bfloat16()
        rows = (shape[0], *shape[2:])
        self.target = torch.randint(0, shape[1], rows, device=self.device)
        self.x.scatter_(1, self.target.unsqueeze(1), math.log(shape[1]) + 0.5)
        self.x.requires_grad_(requires_grad)

    def expected(self, reduction="mean"):
        return torch.nn.functional.cross_entropy(self.x, self.target, reduction=reduction)

    def setup_llama2_7b(self):
        self.make("llama2_7b")

    def benchmark_llama2_7b(self):
        self.out = self.kernel.cross_entropy(self.x, self.target)

    def verify_llama2_7b(self):
        return self.expected().float()

    def setup_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_llama3_8b(self):
        self.out = self.kernel.cross_entropy(self.x, self.target)

    def verify_llama3_8b(self):
        return self.expected().float()

    def setup_gemma3(self):
        self.make("gemma3")

    def benchmark_gemma3(self):
        self.out = self.kernel.cross_entropy(self.x, self.target)

    def verify_gemma3(self):
        return self.expected().float()

    def setup_segformer(self):
        self.make("segformer")

    def benchmark_segformer(self):
        self.out = self.kernel.cross_entropy(self.x, self.target)

    def verify_segformer(self):
        return self.expected().float()

    def setup_forward_backward_llama3_8b(self):
        self.make("llama3_8b", requires_grad=True)

    def benchmark_forward_backward_llama3_8b(self):
        loss = self.kernel.cross_entropy(self.x, self.target, reduction="sum")
        (self.out,) = torch.autograd.grad(loss, self.x)

    def verify_forward_backward_llama3_8b(self):
        return torch.autograd.grad(self.expected("sum"), self.x)[0]

    def setup_backward_segformer(self):
        self.make("segformer", requires_grad=True)
        self.loss = self.kernel.cross_entropy(self.x, self.target, reduction="sum")
        self.loss_torch = self.expected("sum")

    def benchmark_backward_segformer(self):
        (self.out,) = torch.autograd.grad(self.loss, self.x, retain_graph=True)

    def verify_backward_segformer(self):
        return torch.autograd.grad(self.loss_torch, self.x, retain_graph=True)[0]
