"""normalize at the sizes of models, in bfloat16: `kernels benchmark .` times it and holds it against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (shape, dim)
CASES = {
    "qwen3_next_keys": ((524288, 128), -1),  # queries or keys of each head
    "clip_embeddings": ((65536, 768), -1),
    "channels": ((64, 512, 4096), 1),
}


def bytes_moved(*shape):
    return 2 * 2 * torch.Size(shape).numel()  # read x, write y


class NormalizeBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        shape, self.dim = CASES[case]
        self.x = torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def setup_qwen3_next_keys(self):
        self.make("qwen3_next_keys")

    def benchmark_qwen3_next_keys(self):
        self.out = self.kernel.normalize(self.x, eps=1e-6, mode="rsqrt")

    def verify_qwen3_next_keys(self):
        return self.x * torch.rsqrt((self.x * self.x).sum(-1, keepdim=True) + 1e-6)

    def setup_clip_embeddings(self):
        self.make("clip_embeddings")

    def benchmark_clip_embeddings(self):
        self.out = self.kernel.normalize(self.x)

    def verify_clip_embeddings(self):
        return torch.nn.functional.normalize(self.x, dim=-1)

    def setup_channels(self):
        self.make("channels")

    def benchmark_channels(self):
        self.out = self.kernel.normalize(self.x, dim=1)

    def verify_channels(self):
        return torch.nn.functional.normalize(self.x, dim=1)

    def setup_backward_clip_embeddings(self):
        self.make("clip_embeddings")
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.y, self.y_expected = self.kernel.normalize(self.x), torch.nn.functional.normalize(self.x, dim=-1)

    def benchmark_backward_clip_embeddings(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_clip_embeddings(self):
        (dx,) = torch.autograd.grad(self.y_expected, self.x, self.dy, retain_graph=True)
        return dx
