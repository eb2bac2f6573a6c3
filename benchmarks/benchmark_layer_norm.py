"""LayerNorm at the sizes of models, in bfloat16: `kernels benchmark .` times it and holds it against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (rows, N)
CASES = {
    "bert_base": (65536, 768),
    "whisper_large": (24000, 1280),  # 16 clips of 1500 frames
    "gpt3_175b": (8192, 12288),
}


def bytes_moved(rows, N):
    return 2 * (2 * rows * N + 2 * N)  # read x, the weight and the bias, write y


class LayerNormBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        rows, N = CASES[case]
        self.x = torch.randn(rows, N, device=self.device, dtype=torch.bfloat16)
        self.residual = torch.randn_like(self.x)
        # Small weights: 1 ulp of the result stays below the runner's tolerance of 1e-2.
        self.weight, self.bias = (torch.rand(N, device=self.device, dtype=torch.bfloat16) / 8 for _ in range(2))

    def expected(self, x):
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias)

    def setup_bert_base(self):
        self.make("bert_base")

    def benchmark_bert_base(self):
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias)

    def verify_bert_base(self):
        return self.expected(self.x)

    def setup_whisper_large(self):
        self.make("whisper_large")

    def benchmark_whisper_large(self):
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias)

    def verify_whisper_large(self):
        return self.expected(self.x)

    def setup_gpt3_175b(self):
        self.make("gpt3_175b")

    def benchmark_gpt3_175b(self):
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias)

    def verify_gpt3_175b(self):
        return self.expected(self.x)

    def setup_add_bert_base(self):
        self.make("bert_base")

    def benchmark_add_bert_base(self):
        self.out, self.total = self.kernel.add_layer_norm(self.x, self.residual, self.weight, self.bias)

    def verify_add_bert_base(self):
        return self.expected(self.x + self.residual)

    def setup_backward_bert_base(self):
        self.make("bert_base")
        self.leaves = [t.requires_grad_() for t in (self.x, self.weight, self.bias)]
        self.dy = torch.randn_like(self.x) / 4
        self.y, self.y_expected = self.kernel.layer_norm(*self.leaves), self.expected(self.x)

    def benchmark_backward_bert_base(self):
        self.out, *_ = torch.autograd.grad(self.y, self.leaves, self.dy, retain_graph=True)

    def verify_backward_bert_base(self):
        return torch.autograd.grad(self.y_expected, self.leaves, self.dy, retain_graph=True)[0]
