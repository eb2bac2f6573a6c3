"""Softmax at the sizes of models, in bfloat16: `kernels benchmark .` times it and holds it against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (shape, dim)
CASES = {
    "llama3_8b_scores": ((65536, 2048), -1),  # 32 heads of 2048 queries by 2048 keys
    "qwen3_moe_router": ((131072, 128), -1),
    "gemma3_vocabulary": ((512, 262144), -1),
    "segformer_classes": ((8, 150, 16384), 1),  # 150 classes of each of 128 x 128 pixels
    "llama3_8b_logprobs": ((1024, 128256), -1),
}


def bytes_moved(case, backward=False):
    elements = torch.Size(CASES[case][0]).numel()
    if case == "llama3_8b_logprobs":
        return (2 + 4) * elements  # read x, write y in float32
    return 2 * (3 if backward else 2) * elements  # read x, write y; backward: read dy and y, write dx


class SoftmaxBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        shape, self.dim = CASES[case]
        # Spread out, so that a row's largest probability is near 0.2 and not below the runner's tolerance of 1e-2.
        self.x = (4 * torch.randn(shape, device=self.device)).bfloat16().requires_grad_(requires_grad)

    def expected(self):
        return torch.nn.functional.softmax(self.x, self.dim)

    def setup_llama3_8b_scores(self):
        self.make("llama3_8b_scores")

    def benchmark_llama3_8b_scores(self):
        self.out = self.kernel.softmax(self.x, -1)

    def verify_llama3_8b_scores(self):
        return self.expected()

    def setup_qwen3_moe_router(self):
        self.make("qwen3_moe_router")

    def benchmark_qwen3_moe_router(self):
        self.out = self.kernel.softmax(self.x, -1)

    def verify_qwen3_moe_router(self):
        return self.expected()

    def setup_gemma3_vocabulary(self):
        self.make("gemma3_vocabulary")

    def benchmark_gemma3_vocabulary(self):
        self.out = self.kernel.softmax(self.x, -1)

    def verify_gemma3_vocabulary(self):
        return self.expected()

    def setup_segformer_classes(self):
        self.make("segformer_classes")

    def benchmark_segformer_classes(self):
        self.out = self.kernel.softmax(self.x, 1)

    def verify_segformer_classes(self):
        return self.expected()

    def setup_llama3_8b_logprobs(self):
        self.make("llama3_8b_logprobs")

    def benchmark_llama3_8b_logprobs(self):
        self.out = self.kernel.log_softmax(self.x, -1, dtype=torch.float32)

    def verify_llama3_8b_logprobs(self):
        return torch.nn.functional.log_softmax(self.x, -1, dtype=torch.float32)

    def setup_backward_llama3_8b_scores(self):
        self.make("llama3_8b_scores", requires_grad=True)
        self.dy = torch.randn_like(self.x)
        self.y, self.y_torch = self.kernel.softmax(self.x, -1), self.expected()

    def benchmark_backward_llama3_8b_scores(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_llama3_8b_scores(self):
        return torch.autograd.grad(self.y_torch, self.x, self.dy, retain_graph=True)[0]
