"""GroupNorm with SiLU at the sizes of diffusion models, in bfloat16: `kernels benchmark .` times it against torch."""

import torch
from kernels.benchmark import Benchmark

# name: (shape, channels_last), 32 groups
CASES = {
    "sdxl_unet": ((8, 320, 128, 128), False),
    "sdxl_unet_channels_last": ((8, 320, 128, 128), True),
    "sdxl_unet_inner": ((8, 1280, 32, 32), False),
    "vae_decoder": ((1, 128, 1024, 1024), False),  # few large groups
    "vae_decoder_channels_last": ((1, 128, 1024, 1024), True),
}


def bytes_moved(batch, channels, height, width):
    return 2 * (2 * batch * channels * height * width + 2 * channels)  # read x, weight and bias, write y


class GroupNormBenchmark(Benchmark):
    seed = 0

    def make(self, case):
        shape, channels_last = CASES[case]
        self.x = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        if channels_last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        # Small weights: 1 ulp of the result stays below the runner's tolerance of 1e-2.
        self.weight = torch.rand(shape[1], device=self.device, dtype=torch.bfloat16) / 4
        self.bias = torch.rand(shape[1], device=self.device, dtype=torch.bfloat16) / 4

    def compute(self):
        self.out = self.kernel.group_norm(self.x, 32, self.weight, self.bias, 1e-6, activation="silu")

    def expected(self):
        y = torch.nn.functional.group_norm(self.x, 32, self.weight, self.bias, 1e-6)
        return torch.nn.functional.silu(y)

    def setup_sdxl_unet(self):
        self.make("sdxl_unet")

    def benchmark_sdxl_unet(self):
        self.compute()

    def verify_sdxl_unet(self):
        return self.expected()

    def setup_sdxl_unet_channels_last(self):
        self.make("sdxl_unet_channels_last")

    def benchmark_sdxl_unet_channels_last(self):
        self.compute()

    def verify_sdxl_unet_channels_last(self):
        return self.expected()

    def setup_sdxl_unet_inner(self):
        self.make("sdxl_unet_inner")

    def benchmark_sdxl_unet_inner(self):
        self.compute()

    def verify_sdxl_unet_inner(self):
        return self.expected()

    def setup_vae_decoder(self):
        self.make("vae_decoder")

    def benchmark_vae_decoder(self):
        self.compute()

    def verify_vae_decoder(self):
        return self.expected()

    def setup_vae_decoder_channels_last(self):
        self.make("vae_decoder_channels_last")

    def benchmark_vae_decoder_channels_last(self):
        self.compute()

    def verify_vae_decoder_channels_last(self):
        return self.expected()

    def setup_backward_sdxl_unet(self):
        self.make("sdxl_unet")
        self.x.requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.compute()
        self.y, self.y_expected = self.out, self.expected()

    def benchmark_backward_sdxl_unet(self):
        (self.out,) = torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)

    def verify_backward_sdxl_unet(self):
        (dx,) = torch.autograd.grad(self.y_expected, self.x, self.dy, retain_graph=True)
        return dx
