"""Activations at the sizes of models, in bfloat16, timed and held against torch by `kernels benchmark .`"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: (tokens, width)
CASES = {
    "bert_large": (32768, 4096),
    "siglip_so400m": (23328, 4304),  # 32 images of 729 patches
    "clip_vit_l": (18464, 4096),  # 32 images of 577 patches
    "nemotron4_15b": (8192, 24576),
    "stable_diffusion_vae": (16384, 8192),  # 512 channels of 512 x 512, flattened
}


def bytes_moved(tokens, width):
    return 2 * 2 * tokens * width  # read x, write y


class ActivationBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        # Small values: a few ulps of the result stay below the runner's tolerance of 1e-2.
        self.x = torch.randn(*CASES[case], device=self.device, dtype=torch.bfloat16) / 8

    def setup_gelu_bert_large(self):
        self.make("bert_large")

    def benchmark_gelu_bert_large(self):
        self.out = self.kernel.gelu(self.x)

    def verify_gelu_bert_large(self):
        return F.gelu(self.x)

    def setup_gelu_tanh_siglip_so400m(self):
        self.make("siglip_so400m")

    def benchmark_gelu_tanh_siglip_so400m(self):
        self.out = self.kernel.gelu(self.x, approximate="tanh")

    def verify_gelu_tanh_siglip_so400m(self):
        return F.gelu(self.x, approximate="tanh")

    def setup_quick_gelu_clip_vit_l(self):
        self.make("clip_vit_l")

    def benchmark_quick_gelu_clip_vit_l(self):
        self.out = self.kernel.quick_gelu(self.x)

    def verify_quick_gelu_clip_vit_l(self):
        return self.x * torch.sigmoid(1.702 * self.x)

    def setup_relu_squared_nemotron4_15b(self):
        self.make("nemotron4_15b")

    def benchmark_relu_squared_nemotron4_15b(self):
        self.out = self.kernel.relu_squared(self.x)

    def verify_relu_squared_nemotron4_15b(self):
        return F.relu(self.x).square()

    def setup_silu_stable_diffusion_vae(self):
        self.make("stable_diffusion_vae")

    def benchmark_silu_stable_diffusion_vae(self):
        self.out = self.kernel.silu(self.x)

    def verify_silu_stable_diffusion_vae(self):
        return F.silu(self.x)

    def setup_gelu_backward_bert_large(self):
        self.make("bert_large")
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x) / 4
        self.y, self.y_expected = self.kernel.gelu(self.x), F.gelu(self.x)

    def benchmark_gelu_backward_bert_large(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_gelu_backward_bert_large(self):
        (dx,) = torch.autograd.grad(self.y_expected, self.x, self.dy, retain_graph=True)
        return dx
