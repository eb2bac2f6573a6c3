"""Attention as models of transformers call it: its function and its mask, registered with transformers under one name.

The mask is that of PyTorch's attention, but where it hides padding alone: then it stays (B, 1, 1, keys), a bool, which
the kernels read where it lies. No mask of queries by keys is made, no rows are gathered, and nothing waits for the
device to see where padding is, all of which transformers does before it calls the attention of others.
"""

import sys

from .attention import scaled_dot_product_attention

NAME = "portable_kernels.attention"  # without "flash", by which transformers knows attention of another kind


def attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, **kwargs
):
    """(values of queries (B, Sq, H, D), None) of (B, H, S, D) tensors."""
    for name in ("softcap", "s_aux", "cache"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"patch_attention: {name} must be None; attention by name has it, see the guide")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = query.shape[2] > 1 and attention_mask is None and is_causal
    if is_causal and key.shape[2] > query.shape[2]:  # the first tokens of a cache of fixed size
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = position_bias if position_bias is None else position_bias[..., : query.shape[2]]
    if position_bias is not None:
        joined = sys.modules["transformers.integrations.sdpa_attention"].create_position_bias_mask
        attention_mask, is_causal = joined(position_bias, attention_mask, is_causal, query, key), False
    y = scaled_dot_product_attention(query, key, value, attention_mask, dropout, is_causal, scaling, True)
    return y.transpose(1, 2), None


def mask(*, mask_function, kv_length, kv_offset, attention_mask, allow_is_bidirectional_skip=False, **kwargs):
    """What `attention` gets as its mask, None where there is nothing to hide."""
    masking = sys.modules["transformers.masking_utils"]
    if mask_function is masking.bidirectional_mask_function and allow_is_bidirectional_skip:
        if attention_mask is None:
            return None
        if not kv_offset and attention_mask.dim() == 2 and attention_mask.shape[1] == kv_length:
            return attention_mask[:, None, None, :]
    return masking.sdpa_mask(
        mask_function=mask_function, kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs,
    )  # fmt: skip


def use(model):
    """Have the model, and the models in it, attend by this where they attend by PyTorch's: [(name, module), ...]."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, mask)
    return [(name, module) for name, module in model.named_modules() if switch(module, "sdpa", NAME)]


def switch(module, before, after):
    """Whether the module is a model of transformers whose attention was `before` and is now `after`."""
    name = "_attn_implementation"
    if getattr(getattr(module, "config", None), name, None) != before or not hasattr(module, "set_attn_implementation"):
        return False
    module.set_attn_implementation({"": after})  # of this config, and not of those in it
    return getattr(module.config, name) == after
