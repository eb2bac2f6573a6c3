"""Linear layer and cross-entropy at the sizes of models, in bfloat16: `kernels benchmark .` times both ways.

Peak memory, and time beside other packages: `python benchmarks/memory_linear_cross_entropy.py`.
"""

import torch
from kernels.benchmark import Benchmark

# name: tokens, width, classes
CASES = {
    "llama2_7b": (4096, 4096, 32000),
    "llama3_8b": (4096, 4096, 128256),
    "gemma3_1b": (4096, 1152, 262144),
}


def flops(case, backward=False):
    T, H, V = CASES[case]
    return 2 * T * H * V * (3 if backward else 1)  # the logits; and the gradients of x and of the weight


class LinearCrossEntropyBenchmark(Benchmark):
    seed = 0

    def make(self, case, requires_grad=False):
        T, H, V = CASES[case]
        self.x = torch.randn(T, H, device=self.device).bfloat16().requires_grad_(requires_grad)
        # Logits of about 0.05, so that 1 ulp of torch's loss of about 11 is the only one to be seen; in float32 below.
        self.w = (0.05 * torch.randn(V, H, device=self.device) * H**-0.5).bfloat16().requires_grad_(requires_grad)
        self.target = torch.randint(0, V, (T,), device=self.device)

    def expected(self):
        logits = torch.nn.functional.linear(self.x, self.w)
        return torch.nn.functional.cross_entropy(logits.float(), self.target)

    def setup_llama2_7b(self):
        self.make("llama2_7b")

    def benchmark_llama2_7b(self):
        self.out = self.kernel.linear_cross_entropy(self.x, self.w, self.target)

    def verify_llama2_7b(self):
        return self.expected()

    def setup_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_llama3_8b(self):
        self.out = self.kernel.linear_cross_entropy(self.x, self.w, self.target)

    def verify_llama3_8b(self):
        return self.expected()

    def setup_gemma3_1b(self):
        self.make("gemma3_1b")

    def benchmark_gemma3_1b(self):
        self.out = self.kernel.linear_cross_entropy(self.x, self.w, self.target)

    def verify_gemma3_1b(self):
        return self.expected()

    def setup_forward_backward_llama3_8b(self):
        self.make("llama3_8b", requires_grad=True)

    def benchmark_forward_backward_llama3_8b(self):
        loss = self.kernel.linear_cross_entropy(self.x, self.w, self.target)
        self.out, _ = torch.autograd.grad(loss, (self.x, self.w))

    def verify_forward_backward_llama3_8b(self):
        logits = torch.nn.functional.linear(self.x, self.w)
        return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, self.target), (self.x, self.w))[0]

    def setup_token_log_probs_llama3_8b(self):
        self.make("llama3_8b")

    def benchmark_token_log_probs_llama3_8b(self):
        self.out = self.kernel.token_log_probs(self.x, self.w, self.target)

    def verify_token_log_probs_llama3_8b(self):
        logits = torch.nn.functional.linear(self.x, self.w)
        return torch.log_softmax(logits.float(), -1).gather(-1, self.target.unsqueeze(-1)).squeeze(-1)
