"""Decode attention at the sizes of real models, in bfloat16, timed and held against torch by `kernels benchmark .`"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# name: (sequences, query heads, heads of keys, keys, head dim)
CASES = {
    "llama3_8b_8k": (16, 32, 8, 8192, 128),
    "llama3_70b_128k": (1, 64, 8, 131072, 128),
    "qwen3_4b_32k": (4, 32, 8, 32768, 128),
    "gemma2_9b_8k": (8, 16, 8, 8192, 256),
}
PAGE = 256


def bytes_moved(case):
    B, _, heads, T, D = CASES[case]
    return 2 * 2 * B * heads * T * D  # keys and values; queries and results are small


class KvCacheAttentionBenchmark(Benchmark):
    seed = 0

    def make(self, case, paged=False):
        B, H, heads, T, D = CASES[case]
        self.q = torch.randn(B, 1, H, D, device=self.device, dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(B, T, heads, D, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        self.lengths = torch.full((B,), T, device=self.device, dtype=torch.int32)
        if paged:
            self.table = torch.arange(B * T // PAGE, device=self.device, dtype=torch.int32).view(B, -1)
            self.k_pages, self.v_pages = (t.view(-1, PAGE, heads, D) for t in (self.k, self.v))

    def attend(self):
        self.out = self.kernel.flash_attn_with_kvcache(
            self.q, self.k, self.v, cache_seqlens=self.lengths, causal=True
        )  # fmt: skip

    def by_torch(self):
        q, k, v = (t.transpose(1, 2) for t in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def setup_llama3_8b_8k(self):
        self.make("llama3_8b_8k")

    def benchmark_llama3_8b_8k(self):
        self.attend()

    def verify_llama3_8b_8k(self):
        return self.by_torch()

    def setup_paged_llama3_8b_8k(self):
        self.make("llama3_8b_8k", paged=True)

    def benchmark_paged_llama3_8b_8k(self):
        self.out = self.kernel.flash_attn_with_kvcache(
            self.q, self.k_pages, self.v_pages, cache_seqlens=self.lengths, block_table=self.table, causal=True
        )

    def verify_paged_llama3_8b_8k(self):
        return self.by_torch()

    def setup_llama3_70b_128k(self):
        self.make("llama3_70b_128k")

    def benchmark_llama3_70b_128k(self):
        self.attend()

    def verify_llama3_70b_128k(self):
        return self.by_torch()

    def setup_qwen3_4b_32k(self):
        self.make("qwen3_4b_32k")

    def benchmark_qwen3_4b_32k(self):
        self.attend()

    def verify_qwen3_4b_32k(self):
        return self.by_torch()

    def setup_gemma2_9b_8k(self):
        self.make("gemma2_9b_8k")

    def benchmark_gemma2_9b_8k(self):
        self.attend()

    def verify_gemma2_9b_8k(self):
        return self.by_torch()
