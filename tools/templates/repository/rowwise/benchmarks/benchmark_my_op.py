"""my_op at sizes of models, in bfloat16, held against torch, for `kernels benchmark .`."""

import torch
from kernels.benchmark import Benchmark

CASES = {"scores": (16384, 4096), "wide": (2048, 32768)}  # rows, columns


def bytes_moved(rows, columns):
    return 2 * 2 * rows * columns  # read x, write y, 2 bytes each


class MyOpBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        self.x = torch.randn(*CASES[case], device=self.device, dtype=torch.bfloat16)

    def run(self):
        self.out = self.kernel.my_op(self.x)

    def expected(self):
        return torch.softmax(self.x, -1)

    def setup_scores(self):
        self.make("scores")

    def benchmark_scores(self):
        self.run()

    def verify_scores(self):
        return self.expected()

    def setup_wide(self):
        self.make("wide")

    def benchmark_wide(self):
        self.run()

    def verify_wide(self):
        return self.expected()
