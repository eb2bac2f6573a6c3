"""Portable Triton kernels for training and inference, with PyTorch's semantics."""

from . import layers, patching, reductions
from ._report import report
from ._warmup import warmup
from .activations import (
    gelu,
    hardswish,
    leaky_relu,
    mish,
    quick_gelu,
    relu,
    relu_squared,
    sigmoid,
    silu,
    softplus,
    tanh,
)
from .attention import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention
from .cross_entropy import cross_entropy, vocab_parallel_cross_entropy
from .distillation import distillation_jsd, distillation_kl
from .dropout import dropout, dropout_add
from .epilogues import bias_act, residual_scale_add
from .gated import (
    gated,
    geglu,
    gelu_and_mul,
    gelu_tanh_and_mul,
    mul_and_gelu,
    mul_and_silu,
    reglu,
    relu_and_mul,
    silu_and_mul,
    swiglu,
)
from .gated_norm import rms_norm_gated
from .group_norm import group_norm
from .grouped_mm import grouped_mm
from .kv_cache_attention import flash_attn_with_kvcache
from .layer_norm import add_layer_norm, layer_norm
from .linear_cross_entropy import linear_cross_entropy, token_log_probs
from .masked_softmax import masked_softmax
from .matmul import gated_linear, linear, matmul
from .modulated_norm import modulated_layer_norm, modulated_rms_norm
from .normalize import normalize
from .rms_norm import add_rms_norm, rms_norm
from .rotary import apply_rotary_pos_emb, qk_norm_rotary, rotary
from .scaled_matmul import quantize_fp8, scaled_matmul
from .softmax import log_softmax, softmax
from .topk_softmax import topk_softmax

__all__ = [
    "softmax",
    "log_softmax",
    "masked_softmax",
    "topk_softmax",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "rms_norm_gated",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "group_norm",
    "normalize",
    "relu",
    "relu_squared",
    "leaky_relu",
    "silu",
    "gelu",
    "quick_gelu",
    "sigmoid",
    "tanh",
    "softplus",
    "mish",
    "hardswish",
    "gated",
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "mul_and_gelu",
    "gelu_tanh_and_mul",
    "relu_and_mul",
    "swiglu",
    "geglu",
    "reglu",
    "bias_act",
    "residual_scale_add",
    "apply_rotary_pos_emb",
    "rotary",
    "qk_norm_rotary",
    "cross_entropy",
    "linear_cross_entropy",
    "token_log_probs",
    "vocab_parallel_cross_entropy",
    "distillation_kl",
    "distillation_jsd",
    "dropout",
    "dropout_add",
    "matmul",
    "linear",
    "gated_linear",
    "grouped_mm",
    "scaled_matmul",
    "quantize_fp8",
    "scaled_dot_product_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "reductions",
    "layers",
    "patching",
    "report",
    "warmup",
]
