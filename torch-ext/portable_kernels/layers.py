"""Layers for `kernels.kernelize`: each is a forward that is bound to the module it replaces.

A layer has no state and no constructor; it may read only what the original module surely has. All have a backward and
trace under torch.compile, so one entry of a kernel mapping serves training, inference and compilation.
"""

from functools import partial

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ._dispatch import is_plain
from .activations import gelu, quick_gelu, silu
from .cross_entropy import cross_entropy
from .dropout import dropout
from .gated import geglu, gelu_and_mul, gelu_tanh_and_mul, mul_and_gelu, mul_and_silu, silu_and_mul, swiglu
from .gated_norm import rms_norm_gated
from .group_norm import group_norm
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .matmul import linear
from .rms_norm import rms_norm
from .rotary import apply_rotary_pos_emb
from .softmax import softmax
from .topk_softmax import topk_softmax

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

# Whether saved_tensors_hooks are in force. None in a torch that does not tell.
_hooked = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

# The form of gelu that an activation module computes, by its class.
_GELU_FORMS = {
    "GELUActivation": "none",
    "GELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
}


def _named(cls, names):
    """Whether a class or one that it derives from is in the table: FSDP derives a class of its own from each."""
    return any(c.__name__ in names for c in cls.__mro__)


def _gated_casting(cls):
    return "after_weight" if _named(cls, _GATED_ROUND_ONCE) else "before_weight"


def _casting(cls):
    after = _named(cls, _ROUND_AFTER_WEIGHT) or issubclass(cls, nn.RMSNorm)
    return "after_weight" if after else "before_weight"


def _is_silu(act_fn):
    return act_fn is nn.functional.silu or type(act_fn).__name__ in ("SiLUActivation", "SiLU")


def _gelu_form(act_fn):
    """ "none" or "tanh"; None where it is no gelu."""
    if act_fn is nn.functional.gelu:
        return "none"
    return act_fn.approximate if isinstance(act_fn, nn.GELU) else _GELU_FORMS.get(type(act_fn).__name__)


def _name(act_fn):
    return getattr(act_fn, "__name__", type(act_fn).__name__)


def _over_shape(norm, x, shape, eps):
    """A norm without weights over the trailing dimensions `shape`."""
    if x.shape[-len(shape) :] != torch.Size(shape):
        raise ValueError(f"{norm.__name__}: x must end in {tuple(shape)}, got {tuple(x.shape)}")
    return norm(x.flatten(-len(shape)), eps=eps).view(x.shape)


def _rms_norm_to_weight(x, weight, bias, eps):
    """Rows rounded to the dtype of a weight of 16 bits, then multiplied by it."""
    if weight is None:
        return rms_norm(x, None, eps)
    if weight.dtype in (torch.float16, torch.bfloat16) and weight.dtype != x.dtype:
        # The product is of what was rounded to the weight's dtype, which no rounding of rms_norm is.
        y = rms_norm(x.float(), None, eps).to(weight.dtype) * weight
        return y if bias is None else y + bias
    x = x.to(torch.promote_types(x.dtype, weight.dtype))
    return rms_norm(x, weight, eps, bias=bias, casting="before_weight")


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
        return _rms_norm_to_weight(hidden_states, self.weight, self.bias, self.eps)


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


class NewGELU(nn.Module):
    """transformers' NewGELUActivation: the tanh form, rounded once."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, approximate="tanh")


class FastGELU(nn.Module):
    """transformers' FastGELUActivation: the tanh form, rounded once."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, approximate="tanh")


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


def _projected(project, multiply, gate, up):
    """project(multiply(gate, up)), whose backward forms the product again, of what the product's own gradient keeps.

    So a gated MLP keeps two wide tensors for training, not three.
    """
    product = multiply(gate, up)
    if torch.compiler.is_compiling() or not is_plain((product,)) or _hooked is None or _hooked(True):
        return project(product)  # what others do with saved tensors, as checkpointing does, is theirs
    node = product.grad_fn
    if not isinstance(node, BackwardCFunction):  # no gradient is asked for, or no kernel ran
        return project(product)
    this = (product.data_ptr(), product.numel(), product.dtype)

    def pack(t):
        same = type(t) is torch.Tensor and (t.data_ptr(), t.numel(), t.dtype) == this
        return (node, t.shape) if same and t.is_contiguous() else t

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        node, shape = kept
        with torch.no_grad():
            return multiply(*node.saved_tensors).view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return project(product)


class SwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)); the projections are called, whatever they are, and act_fn is silu."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _is_silu(self.act_fn):
            raise TypeError(f"SwiGLUMLP: act_fn must be silu, got {_name(self.act_fn)}")
        return _projected(self.down_proj, swiglu, self.gate_proj(x), self.up_proj(x))


class GeGLUMLP(nn.Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), with the form of gelu that act_fn is."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form = _gelu_form(self.act_fn)
        if form is None:
            raise TypeError(f"GeGLUMLP: act_fn must be gelu, got {_name(self.act_fn)}")
        return _projected(self.down_proj, partial(geglu, approximate=form), self.gate_proj(x), self.up_proj(x))


class Linear(nn.Module):
    """torch.nn.Linear."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class SoftmaxTopKRouter(nn.Module):
    """transformers' routers of that name: (logits, weights that sum to 1, experts). The logits are PyTorch's own."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor):
        if hasattr(self, "e_score_correction_bias"):  # Laguna's goes by the same name
            raise TypeError("SoftmaxTopKRouter: the router must be a softmax, got one with e_score_correction_bias")
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        return logits, *topk_softmax(logits, self.top_k, renormalize=True)


class ForCausalLMLoss(nn.Module):
    """transformers' ForCausalLMLoss; with hidden_states and lm_head_weight the logits are not read, and never whole."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        hidden_states=None,
        lm_head_weight=None,
        lm_head_bias=None,
        **kwargs,
    ):
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        if hidden_states is None:
            logits = logits.view(-1, vocab_size)
            loss = cross_entropy(logits, shift_labels.reshape(-1).to(logits.device), None, ignore_index, reduction)
        else:
            loss = linear_cross_entropy(
                hidden_states.flatten(0, -2),
                lm_head_weight,
                shift_labels.reshape(-1).to(hidden_states.device),
                linear_bias=lm_head_bias,
                ignore_index=ignore_index,
                reduction=reduction,
                softcap=kwargs.get("final_logit_softcapping"),
                logit_scale=kwargs.get("logit_scale", 1.0),
            )
        if torch.is_tensor(num_items_in_batch):  # on another device where each of several models has a part
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if reduction == "mean" else loss / num_items_in_batch


class apply_rotary_transformers(nn.Module):
    """transformers' apply_rotary_pos_emb, under the layer name "rotary_pos_emb"; partial where cos is narrower.

    The results have the dtypes of q and k: OLMo 2 rotates by float32 tables and rounds.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        q_rotated, k_rotated = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        return q_rotated.to(q.dtype), k_rotated.to(k.dtype)
