"""The forwards that `patching` binds to modules of a loaded model.

A method is pickled by its name. All of these are named forward, so that a pickle of a patched module finds the forward
of its own class again, also where this package is not there.
"""

import functools
import sys

import torch
from torch import nn

from .activations import gelu, mish, quick_gelu, relu_squared, silu
from .gated import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .gated_norm import rms_norm_gated
from .group_norm import group_norm
from .layer_norm import layer_norm
from .layers import DiffusersGEGLU, DiffusersSwiGLU, ForCausalLMLoss, GeGLUMLP, SwiGLUMLP, _rms_norm_to_weight
from .rms_norm import rms_norm
from .rotary import apply_rotary_pos_emb


def _only(args, kwargs):
    """The one argument of a call, whatever its class calls it."""
    (x,) = (*args, *kwargs.values())
    return x


def eps_of(module):
    """Under any of its three names."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError("no eps")


def _rms_norm(module, x, **options):
    weight = getattr(module, "weight", None)
    if weight is None and hasattr(module, "normalized_shape") and len(module.normalized_shape) > 1:
        return rms_norm(x.flatten(-len(module.normalized_shape)), eps=eps_of(module)).view(x.shape)
    return rms_norm(x, weight, eps_of(module), **options)


class RmsNormBeforeWeight:
    def forward(self, *args, **kwargs):
        return _rms_norm(self, _only(args, kwargs), casting="before_weight")


class RmsNormOnce:
    def forward(self, *args, **kwargs):
        return _rms_norm(self, _only(args, kwargs), casting="after_weight")


class RmsNormOnePlusWeight:
    def forward(self, *args, **kwargs):
        return _rms_norm(self, _only(args, kwargs), offset=1.0)


class RmsNormToWeight:
    def forward(self, *args, **kwargs):
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        return _rms_norm_to_weight(_only(args, kwargs), weight, bias, eps_of(self))


def _rms_norm_gated(module, x, gate, **options):
    if gate is None:
        return rms_norm(x, module.weight, eps_of(module), casting=options["casting"])
    activation = getattr(module, "activation", "silu")
    return rms_norm_gated(x, gate, module.weight, eps_of(module), activation=activation, **options)


class GatedRmsNormBeforeWeight:
    def forward(self, hidden_states, gate=None):
        return _rms_norm_gated(self, hidden_states, gate, casting="before_weight")


class GatedRmsNormOnce:
    def forward(self, hidden_states, gate=None):
        return _rms_norm_gated(self, hidden_states, gate, casting="after_weight")


class GateFirstBeforeWeight:
    def forward(self, hidden_states, gate=None):
        return _rms_norm_gated(self, hidden_states, gate, casting="before_weight", norm_before_gate=False)


class GateFirstOnce:
    def forward(self, hidden_states, gate=None):
        return _rms_norm_gated(self, hidden_states, gate, casting="after_weight", norm_before_gate=False)


class LayerNorm:
    def forward(self, *args, **kwargs):
        x, weight = _only(args, kwargs), getattr(self, "weight", None)
        try:
            eps = eps_of(self)
        except AttributeError:
            eps = 1e-5  # OLMo's, written in its forward
        if weight is None:
            n = len(getattr(self, "normalized_shape", (1,)))
            return layer_norm(x.flatten(-n), eps=eps).view(x.shape)
        return layer_norm(x, weight, getattr(self, "bias", None), eps)


class GroupNorm:
    def forward(self, *args, **kwargs):
        return group_norm(_only(args, kwargs), self.num_groups, self.weight, self.bias, eps_of(self))


class Silu:
    def forward(self, *args, **kwargs):
        return silu(_only(args, kwargs))


class Gelu:
    def forward(self, *args, **kwargs):
        return gelu(_only(args, kwargs))


class GeluTanh:
    def forward(self, *args, **kwargs):
        return gelu(_only(args, kwargs), approximate="tanh")


class QuickGelu:
    def forward(self, *args, **kwargs):
        return quick_gelu(_only(args, kwargs))


class ReluSquared:
    def forward(self, *args, **kwargs):
        return relu_squared(_only(args, kwargs))


class Mish:
    def forward(self, *args, **kwargs):
        return mish(_only(args, kwargs))


class Swiglu:
    def forward(self, *args, **kwargs):
        return SwiGLUMLP.forward(self, _only(args, kwargs))


class Geglu:
    def forward(self, *args, **kwargs):
        return GeGLUMLP.forward(self, _only(args, kwargs))


class PackedSwiglu:
    def forward(self, *args, **kwargs):
        return self.down_proj(silu_and_mul(self.gate_up_proj(_only(args, kwargs))))


class PackedGeglu:
    def forward(self, *args, **kwargs):
        return self.down_proj(gelu_and_mul(self.gate_up_proj(_only(args, kwargs))))


class PackedGegluTanh:
    def forward(self, *args, **kwargs):
        return self.down_proj(gelu_tanh_and_mul(self.gate_up_proj(_only(args, kwargs))))


class ProjectedGeglu:
    def forward(self, hidden_states, *args, **kwargs):
        return DiffusersGEGLU.forward(self, hidden_states)


class ProjectedSwiglu:
    def forward(self, *args, **kwargs):
        return DiffusersSwiGLU.forward(self, _only(args, kwargs))


class Rotary:
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class RotaryRounded:
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return _rounded(q, k, *apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim))


class RotaryPairs:
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, interleaved=True)


class RotaryPairsRounded:
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return _rounded(q, k, *apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, interleaved=True))


class RotaryPairsOfHalves:
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, interleaved=True)


def _rounded(q, k, q_rotated, k_rotated):
    return q_rotated.to(q.dtype), k_rotated.to(k.dtype)


class CausalLoss:
    """transformers' ForCausalLMLoss as `model.loss_function`; pickled as the function that it replaced."""

    def __init__(self, original):
        self.original = original

    def __call__(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
        return ForCausalLMLoss.forward(None, logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)

    def __reduce__(self):
        return functools.partial, (self.original,)

    def __deepcopy__(self, memo):
        return self


class CausalLM:
    """Hidden states to loss, where the model trains; the class's own forward, where it does not."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }
        if not self.training or labels is None or not _fuses(self, logits_to_keep, kwargs):
            return type(self).forward(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        outputs = self.model(**inputs, **kwargs)
        names = ("num_items_in_batch", "ignore_index", "shift_labels")
        loss = ForCausalLMLoss.forward(
            None,
            None,
            labels,
            self.config.vocab_size,
            hidden_states=outputs.last_hidden_state,
            lm_head_weight=self.lm_head.weight,
            lm_head_bias=self.lm_head.bias,
            final_logit_softcapping=getattr(self.config, "final_logit_softcapping", None),
            logit_scale=getattr(self, "logit_scale", 1.0) / getattr(self.config, "logits_scaling", 1.0),
            **{k: kwargs[k] for k in names if k in kwargs},
        )
        return sys.modules["transformers.modeling_outputs"].CausalLMOutputWithPast(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _fuses(model, logits_to_keep, kwargs):
    """Whether the head is a plain linear layer, of which the weight is all, and all positions are asked for."""
    head = model.lm_head
    return (
        type(head) is nn.Linear
        and type(head.weight) in (torch.Tensor, nn.Parameter)
        and "forward" not in head.__dict__
        and not head._forward_hooks
        and not head._forward_pre_hooks
        and isinstance(logits_to_keep, int)
        and logits_to_keep == 0
        and kwargs.get("return_dict") is not False
        and getattr(model.config, "return_dict", True)
    )
