"""bias_act and residual_scale_add at the sizes of models, in bfloat16, timed and held against torch by
`kernels benchmark .`"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: (tokens, width)
CASES = {
    "bert_large": (32768, 4096),
    "gpt2_xl": (16384, 6400),
    "deit3_huge": (16448, 1280),  # 64 images of 257 tokens
    "dinov2_giant": (16448, 1536),
}


def bytes_moved(case, backward=False):
    tokens, width = CASES[case]
    residual = case in ("deit3_huge", "dinov2_giant")
    return 2 * (3 if residual or backward else 2) * tokens * width  # x, y and residual; backward: x, dy, dx


class EpiloguesBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        # Small values: a few ulps of the result stay below the runner's tolerance of 1e-2.
        shape = CASES[case]
        self.x, self.residual, self.dy = (
            torch.randn(shape, device=self.device, dtype=torch.bfloat16) / 8 for _ in range(3)
        )
        self.param = torch.randn(shape[1], device=self.device, dtype=torch.bfloat16) / 8
        self.x.requires_grad_(requires_grad)
        self.param.requires_grad_(requires_grad)

    def setup_bias_gelu_bert_large(self):
        self.make("bert_large")

    def benchmark_bias_gelu_bert_large(self):
        self.out = self.kernel.bias_act(self.x, self.param, "gelu")

    def verify_bias_gelu_bert_large(self):
        return F.gelu(self.x + self.param)

    def setup_bias_gelu_tanh_gpt2_xl(self):
        self.make("gpt2_xl")

    def benchmark_bias_gelu_tanh_gpt2_xl(self):
        self.out = self.kernel.bias_act(self.x, self.param, "gelu_tanh")

    def verify_bias_gelu_tanh_gpt2_xl(self):
        return F.gelu(self.x + self.param, approximate="tanh")

    def setup_layer_scale_deit3_huge(self):
        self.make("deit3_huge")

    def benchmark_layer_scale_deit3_huge(self):
        self.out = self.kernel.residual_scale_add(self.x, self.residual, self.param)

    def verify_layer_scale_deit3_huge(self):
        return self.residual + self.x * self.param

    def setup_backward_bias_gelu_bert_large(self):
        self.make("bert_large", requires_grad=True)
        self.y = self.kernel.bias_act(self.x, self.param, "gelu")
        self.y_torch = F.gelu(self.x + self.param)

    def benchmark_backward_bias_gelu_bert_large(self):
        self.out, _ = torch.autograd.grad(self.y, (self.x, self.param), self.dy, retain_graph=True)

    def verify_backward_bias_gelu_bert_large(self):
        return torch.autograd.grad(self.y_torch, (self.x, self.param), self.dy, retain_graph=True)[0]

    def setup_backward_layer_scale_dinov2_giant(self):
        self.make("dinov2_giant", requires_grad=True)
        self.y = self.kernel.residual_scale_add(self.x, self.residual, self.param)
        self.y_torch = self.residual + self.x * self.param

    def benchmark_backward_layer_scale_dinov2_giant(self):
        self.out, _ = torch.autograd.grad(self.y, (self.x, self.param), self.dy, retain_graph=True)

    def verify_backward_layer_scale_dinov2_giant(self):
        return torch.autograd.grad(self.y_torch, (self.x, self.param), self.dy, retain_graph=True)[0]
