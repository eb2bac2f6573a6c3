"""Layers for `kernels.kernelize`: each is a forward that is bound to the module it replaces.

A layer has no state and no constructor; it may read only what the original module surely has. All have a backward and
trace under torch.compile, so one entry of a kernel mapping serves training, inference and compilation.
"""

import torch
from torch import nn

from .activations import gelu, quick_gelu, silu
from .dropout import dropout
from .gated import gelu_and_mul, gelu_tanh_and_mul, mul_and_gelu, mul_and_silu, silu_and_mul
from .gated_norm import rms_norm_gated
from .group_norm import group_norm
from .layer_norm import layer_norm
from .rms_norm import rms_norm
from .rotary import apply_rotary_pos_emb
from .softmax import softmax

# Classes of transformers that multiply by the weight in float32 and round once. The others that go by the name
# "RMSNorm" there round to the input's dtype first. tests/test_layers.py holds the table against their sources.
_ROUND_AFTER_WEIGHT = frozenset(
    {
        "AfmoeRMSNorm",
        "BeamRMSNorm",
        "DeepseekV4RMSNorm",
        "FlexOlmoRMSNorm",
        "FlintRMSNorm",
        "GptOssRMSNorm",
        "NemotronHRMSNorm",
        "NemotronH_Omni_RMSNorm",
        "Olmo2RMSNorm",
        "Olmo3RMSNorm",
        "OlmoHybridRMSNorm",
        "OpenAIPrivacyFilterRMSNorm",
    }
)


# The same of the classes that go by "RMSNormGated": these multiply by the weight in float32.
_GATED_ROUND_ONCE = frozenset({"BailingHybridRMSNormGated", "Glm5NextTextRMSNormGated", "KimiLinearRMSNormGated"})


def _gated_casting(cls):
    return "after_weight" if cls.__name__ in _GATED_ROUND_ONCE else "before_weight"


def _casting(cls):
    after = cls.__name__ in _ROUND_AFTER_WEIGHT or issubclass(cls, nn.RMSNorm)
    return "after_weight" if after else "before_weight"


def _over_shape(norm, x, shape, eps):
    """A norm without weights over the trailing dimensions `shape`."""
    if x.shape[-len(shape) :] != torch.Size(shape):
        raise ValueError(f"{norm.__name__}: x must end in {tuple(shape)}, got {tuple(x.shape)}")
    return norm(x.flatten(-len(shape)), eps=eps).view(x.shape)


class RMSNorm(nn.Module):
    """transformers' RMSNorm classes, each with its own rounding, and torch.nn.RMSNorm."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        if self.weight is None:
            return _over_shape(rms_norm, hidden_states, self.normalized_shape, eps=eps)
        return rms_norm(hidden_states, self.weight, eps, casting=_casting(type(self)))


class TorchRMSNorm(nn.Module):
    """torch.nn.RMSNorm, by the name of its argument; without eps the epsilon of the dtype that sums run in."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return _over_shape(rms_norm, x, self.normalized_shape, eps=self.eps)
        return rms_norm(x, self.weight, self.eps)


class DiffusersRMSNorm(nn.Module):
    """diffusers' RMSNorm, with or without weight and bias. A weight of 16 bits is what the rows are rounded to."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return rms_norm(hidden_states, None, self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16) and self.weight.dtype != hidden_states.dtype:
            # The product is of what was rounded to the weight's dtype, which no rounding of rms_norm is.
            y = rms_norm(hidden_states.float(), None, self.eps).to(self.weight.dtype) * self.weight
            return y if self.bias is None else y + self.bias
        h = hidden_states.to(torch.promote_types(hidden_states.dtype, self.weight.dtype))
        return rms_norm(h, self.weight, self.eps, bias=self.bias, casting="before_weight")


class DiffusersGEGLU(nn.Module):
    """diffusers' GEGLU: the projection's first half times gelu of the second."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return mul_and_gelu(self.proj(hidden_states))


class DiffusersSwiGLU(nn.Module):
    """diffusers' SwiGLU: the projection's first half times silu of the second."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return mul_and_silu(self.proj(hidden_states))


class Dropout(nn.Module):
    """torch.nn.Dropout; in place where it is."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = dropout(input, self.p, self.training)
        return input.copy_(y) if self.inplace else y


class RMSNormZeroCentered(nn.Module):
    """transformers' norms that scale by 1 + weight (Qwen3.5)."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=1.0)


class RMSNormGated(nn.Module):
    """transformers' RMSNormGated classes, each with its own rounding: norm, weight, then the gate's activation."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, gate=None) -> torch.Tensor:
        casting = _gated_casting(type(self))
        if gate is None:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon, casting=casting)
        activation = getattr(self, "activation", "silu")
        return rms_norm_gated(
            hidden_states, gate, self.weight, self.variance_epsilon, activation=activation, casting=casting
        )


class GroupNorm(nn.Module):
    """torch.nn.GroupNorm."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return _over_shape(layer_norm, input, self.normalized_shape, eps=self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps)


class Softmax(nn.Module):
    """torch.nn.Softmax."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Without a dim torch takes the first dimension of 0, 1 and 3 dimensions, else the second.
        dim = (0 if input.dim() in (0, 1, 3) else 1) if self.dim is None else self.dim
        return softmax(input, dim)


class SiLU(nn.Module):
    """transformers' SiLUActivation, torch.nn.SiLU."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)


class GeLU(nn.Module):
    """transformers' GELUActivation: the exact form."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input)


class GeluTanh(nn.Module):
    """transformers' GELUTanh: the tanh form."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, approximate="tanh")


class QuickGELU(nn.Module):
    """transformers' QuickGELUActivation."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quick_gelu(input)


class SiluAndMul(nn.Module):
    """(..., 2N) -> (..., N): silu of the first half times the second."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)


class GeluAndMul(nn.Module):
    """(..., 2N) -> (..., N): gelu of the first half times the second."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(x)


class GeluTanhAndMul(nn.Module):
    """(..., 2N) -> (..., N): gelu, tanh form, of the first half times the second."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_tanh_and_mul(x)


class apply_rotary_transformers(nn.Module):
    """transformers' apply_rotary_pos_emb, under the layer name "rotary_pos_emb"; partial where cos is narrower."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
