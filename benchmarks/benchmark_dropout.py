"""Dropout at the sizes of models, in bfloat16, timed and held against torch by `kernels benchmark .`

The masks are not torch's: x is so small that any mask is within the runner's tolerance of 1e-2.
"""

import torch
from kernels.benchmark import Benchmark

# name: (tokens, width)
CASES = {
    "bert_large": (32768, 1024),
    "gpt2_xl": (16384, 1600),
    "vit_huge": (16448, 5120),  # 64 images of 257 tokens, the wide layer
}


def bytes_moved(case, add=False):
    tokens, width = CASES[case]
    return 2 * (3 if add else 2) * tokens * width  # read x and the residual, write y


class DropoutBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        self.x = torch.randn(*CASES[case], device=self.device, dtype=torch.bfloat16) / 1024
        self.residual = torch.randn_like(self.x) / 8
        self.number = torch.zeros((), dtype=torch.int64, device=self.device)

    def setup_dropout_bert_large(self):
        self.make("bert_large")

    def benchmark_dropout_bert_large(self):
        self.out = self.kernel.dropout(self.x, 0.1)

    def verify_dropout_bert_large(self):
        return torch.nn.functional.dropout(self.x, 0.1)

    def setup_dropout_vit_huge(self):
        self.make("vit_huge")

    def benchmark_dropout_vit_huge(self):
        self.out = self.kernel.dropout(self.x, 0.1)

    def verify_dropout_vit_huge(self):
        return torch.nn.functional.dropout(self.x, 0.1)

    def setup_dropout_given_seed_vit_huge(self):
        self.make("vit_huge")

    def benchmark_dropout_given_seed_vit_huge(self):
        self.out = self.kernel.dropout(self.x, 0.1, seed=self.number)

    def verify_dropout_given_seed_vit_huge(self):
        return torch.nn.functional.dropout(self.x, 0.1)

    def setup_dropout_add_gpt2_xl(self):
        self.make("gpt2_xl")

    def benchmark_dropout_add_gpt2_xl(self):
        self.out = self.kernel.dropout_add(self.x, self.residual, 0.1)

    def verify_dropout_add_gpt2_xl(self):
        return torch.nn.functional.dropout(self.x, 0.1) + self.residual
