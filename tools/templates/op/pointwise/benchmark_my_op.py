"""my_op at sizes of models, in bfloat16, held against torch, for `kernels benchmark .`."""

import torch
from kernels.benchmark import Benchmark

CASES = {"mlp": (16384, 14336), "bert": (32768, 4096)}  # rows, columns


def bytes_moved(rows, columns):
    return 2 * 2 * rows * columns  # read x, write y, 2 bytes each


class MyOpBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        self.x = torch.randn(*CASES[case], device=self.device, dtype=torch.bfloat16)

    def run(self):
        self.out = self.kernel.my_op(self.x)

    def expected(self):
        return torch.nn.functional.silu(self.x)

    def setup_mlp(self):
        self.make("mlp")

    def benchmark_mlp(self):
        self.run()

    def verify_mlp(self):
        return self.expected()

    def setup_bert(self):
        self.make("bert")

    def benchmark_bert(self):
        self.run()

    def verify_bert(self):
        return self.expected()
