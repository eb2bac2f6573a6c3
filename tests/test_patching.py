"""Loaded models, patched: what they compute stays, what was replaced is told, and all of it can be undone."""

import copy
import functools
import importlib
import pickle
import sys
import types

import pytest
import torch
from _inputs import few, tensor
from _numerics import assert_close
from torch import nn

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**SIZES, **HEADS, **ENDS),
    "Qwen3ForCausalLM": lambda: transformers.Qwen3Config(**SIZES, **HEADS, **ENDS, head_dim=8),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(
        **SIZES, **HEADS, **ENDS, head_dim=8, final_logit_softcapping=5.0
    ),
    "Olmo2ForCausalLM": lambda: transformers.Olmo2Config(**SIZES, **HEADS, **ENDS),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(
        vocab_size=48, n_embd=32, n_layer=1, n_head=4, n_positions=64, **ENDS,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "BertForMaskedLM": lambda: transformers.BertConfig(
        **SIZES, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "ViTModel": lambda: transformers.ViTConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    ),
}  # fmt: skip

# What is replaced in each: (op, how) -> how many.
ONCE, HALVES = "rounded once", "halves; for all models of the file"
FUSED = ("linear_cross_entropy", "in training the logits are not formed, and are None")
LOSS = ("cross_entropy", "of logits in their own dtype")
REPLACED = {
    "LlamaForCausalLM": {
        ("rms_norm", "rounded before the weight"): 3, ("swiglu", "projections called"): 1,
        ("apply_rotary_pos_emb", HALVES): 1, FUSED: 1, LOSS: 1,
    },
    "Qwen3ForCausalLM": {
        ("rms_norm", "rounded before the weight"): 5, ("swiglu", "projections called"): 1,
        ("apply_rotary_pos_emb", HALVES): 1, FUSED: 1, LOSS: 1,
    },
    "Gemma3ForCausalLM": {
        ("rms_norm", "1 + weight, rounded once"): 7, ("geglu", "projections called"): 1,
        ("apply_rotary_pos_emb", HALVES): 1, FUSED: 1, LOSS: 1,
    },
    "Olmo2ForCausalLM": {
        ("rms_norm", ONCE): 5, ("swiglu", "projections called"): 1, FUSED: 1, LOSS: 1,
        ("apply_rotary_pos_emb", "halves, rounded to the dtypes of q and k; for all models of the file"): 1,
    },
    "GPT2LMHeadModel": {("layer_norm", ONCE): 3, ("gelu", "tanh form, rounded once"): 1, LOSS: 1},
    "BertForMaskedLM": {("layer_norm", ONCE): 4, ("gelu", "exact form, rounded once"): 2},
    "ViTModel": {("layer_norm", ONCE): 3, ("gelu", "exact form, rounded once"): 1},
}  # fmt: skip


def model_of(name, device="cpu", **changes):
    config = CONFIGS[name]()
    for k, v in changes.items():
        setattr(config, k, v)
    model = getattr(transformers, name)(config)
    for p in model.parameters():  # norms of ones would hide their conventions
        p.data += torch.randn_like(p) * 0.05
    return model.to(device)


def inputs_of(model, labels=True):
    device = next(model.parameters()).device
    if hasattr(model.config, "patch_size"):
        return {"pixel_values": tensor((2, 3, 8, 8), device=device)}
    ids = torch.randint(3, 48, (2, 6), device=device)
    return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}


def step(model, inputs):
    """(loss, logits or None, gradients by name)."""
    model.zero_grad()
    outputs = model(**inputs)
    loss = outputs.loss if "labels" in inputs else outputs.last_hidden_state.square().mean()
    loss.backward()
    return (
        loss.detach(),
        outputs.get("logits"),
        {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None},
    )


def same(found, expected):
    """Of two models in float32 that round on their own; 64 ulps are 4e-6 of the root mean square."""
    assert_close(found, expected.double(), dim=None, ulps=128)


def same_gradients(found, expected):
    """To a millionth of the largest: some are 0 but for rounding, as those of the biases of keys."""
    assert found.keys() == expected.keys()
    slack = 1e-6 * max(g.abs().max().item() for g in expected.values())
    for k, g in found.items():
        assert_close(g, expected[k].double(), dim=None, ulps=128, slack=slack, name=k)


def counted(report):
    counts = {}
    for r in report.replaced:
        counts[r.op, r.how] = counts.get((r.op, r.how), 0) + 1
    return counts


@pytest.fixture
def patching(kernel):
    return kernel.patching


@pytest.mark.parametrize("name", few(CONFIGS))
def test_models(patching, device, name):
    """Loss, logits and every gradient; the report; and bit for bit what it was after unpatching."""
    model = model_of(name)
    plain = copy.deepcopy(model).to(device).train()
    inputs = inputs_of(plain)
    before = step(plain, inputs)
    report = patching.patch_model(model, self_check=True)  # on the CPU, before it moves
    assert counted(report) == REPLACED[name]
    assert f"replaced {len(report.replaced)}, kept {len(report.kept)}" in str(report)
    assert model.state_dict().keys() == plain.state_dict().keys()
    model = model.to(device).train()
    loss, logits, gradients = step(model, inputs)
    same(loss, before[0])
    same_gradients(gradients, before[2])
    assert (logits is None) == (FUSED in REPLACED[name] or before[1] is None)
    if before[1] is not None:
        with torch.no_grad():
            evaluated = model.eval()(**inputs)
        same(evaluated.loss, before[0])
        same(evaluated.logits, before[1])
    patching.unpatch_model(model)
    assert not any("forward" in vars(m) or "_loss_function" in vars(m) for m in model.modules())
    after = step(model.train(), inputs)
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(after[2][k], g) for k, g in before[2].items())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Olmo2ForCausalLM", "Gemma3ForCausalLM"])
def test_norms_keep_their_rounding(patching, device, name):
    """Of a model in bfloat16, norms replaced alone: nearly all logits keep their bits."""
    model = model_of(name, device).to(torch.bfloat16).eval()
    inputs = inputs_of(model, labels=False)
    with torch.no_grad():
        before = model(**inputs).logits
        report = patching.patch_rms_norm(model)
        after = model(**inputs).logits
    assert {r.op for r in report.replaced} == {"rms_norm"} and after.dtype == torch.bfloat16
    assert (before == after).double().mean() > 0.9


def test_training(patching, device, on_kernels):
    """Twenty steps, five in the interpreter: the same curve."""
    steps = 5 if on_kernels and device.type == "cpu" else 20
    curves = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = model_of("LlamaForCausalLM", device).train()
        if patched:
            patching.patch_model(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.02)  # at 0.05 a rounding's weight grows five hundredfold
        inputs, losses = inputs_of(model), []
        for _ in range(steps):
            losses.append(step(model, inputs)[0])
            optimizer.step()
        curves.append(torch.stack(losses))
        patching.unpatch_model(model)
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(*curves, rtol=2e-6, atol=0)


def test_generation(patching, device):
    model = model_of("Gemma3ForCausalLM", device).eval()
    ids = inputs_of(model)["input_ids"]
    generate = functools.partial(model.generate, ids, max_new_tokens=3, do_sample=False, min_new_tokens=3)
    before = generate()
    with patching.patch_model(model, ("rms_norm", "mlp", "rotary")):
        assert torch.equal(generate(), before)


def test_deep_copy(patching, device):
    """A copy is patched, with its own weights; so it is not by a closure."""
    model = model_of("LlamaForCausalLM", device).train()
    inputs = inputs_of(model)
    plain = copy.deepcopy(model)
    patching.patch_model(model, ("rms_norm", "mlp", "loss"))
    first = step(model, inputs)
    other = copy.deepcopy(model)
    assert other.model.norm.forward.__self__ is other.model.norm
    for m in (other, plain):
        for p in m.parameters():
            p.data += 0.1
    loss, _, gradients = step(other, inputs)
    expected = step(plain, inputs)
    same(loss, expected[0])
    same_gradients(gradients, expected[2])
    again = step(model, inputs)
    assert torch.equal(again[0], first[0]) and all(torch.equal(again[2][k], g) for k, g in first[2].items())
    patching.unpatch_model(model)
    patching.unpatch_model(other)


def test_pickle(patching, device):
    """A pickle holds the model unpatched, and names nothing of this package."""
    model = model_of("BertForMaskedLM", device).eval()
    inputs = inputs_of(model)
    before = model(**inputs).logits
    patching.patch_model(model)
    data = pickle.dumps(model)
    assert patching.__name__.split(".")[0].encode() not in data
    loaded = pickle.loads(data)
    assert torch.equal(loaded(**inputs).logits, before)
    loaded.get_submodule("bert.embeddings.LayerNorm").weight.data.zero_()
    same(model(**inputs).logits, before)
    assert patching.patch_model(loaded).replaced
    loss = pickle.loads(pickle.dumps(patching.forwards.CausalLoss(torch.nn.functional.cross_entropy)))
    assert loss.func is torch.nn.functional.cross_entropy


def test_state_dict(patching, device):
    model, other = model_of("LlamaForCausalLM", device).eval(), model_of("LlamaForCausalLM", device).eval()
    inputs = inputs_of(model, labels=False)
    with patching.patch_model(model, ("rms_norm", "mlp")), torch.no_grad():
        model.load_state_dict(other.state_dict())
        found = model(**inputs).logits
    same(found, other(**inputs).logits)


@pytest.fixture
def one_process():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed
    distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", ["fully_shard", "FullyShardedDataParallel"])
def test_fsdp(patching, one_process, wrap):
    """Of both kinds, each block on its own, on the CPU: weights are gathered before these forwards."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    cpu = one_process.init_device_mesh("cpu", (1,)) if wrap == "fully_shard" else None
    name = "Olmo2ForCausalLM"
    model = model_of(name).train()
    inputs = inputs_of(model)
    expected = step(model, inputs)
    model.zero_grad()
    report = patching.patch_model(model)
    assert counted(report) == REPLACED[name]
    if wrap == "fully_shard":
        for layer in model.model.layers:
            fsdp.fully_shard(layer, mesh=cpu)
        wrapped = fsdp.fully_shard(model, mesh=cpu)
    else:
        layer = type(model.model.layers[0])
        policy = functools.partial(
            importlib.import_module("torch.distributed.fsdp.wrap").transformer_auto_wrap_policy,
            transformer_layer_cls={layer},
        )
        wrapped = fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    loss = wrapped(**inputs).loss
    loss.backward()
    same(loss, expected[0])
    found = {k.replace("_fsdp_wrapped_module.", ""): p.grad for k, p in wrapped.named_parameters()}
    found = {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in found.items()}
    same_gradients({k: g.view(expected[2][k].shape) for k, g in found.items()}, expected[2])
    patching.unpatch_model(wrapped)
    patching.unpatch_model(model)


def test_compile(patching, device):
    """Traced whole, in training with the loss and in evaluation."""
    model = model_of("Gemma3ForCausalLM", device).train()
    inputs = inputs_of(model)
    with patching.patch_model(model):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        loss, _, gradients = step(compiled, inputs)
        expected = step(model, inputs)
        same(loss, expected[0])
        same_gradients({k.replace("_orig_mod.", ""): g for k, g in gradients.items()}, expected[2])
        with torch.no_grad():
            same(compiled.eval()(**inputs).logits, model.eval()(**inputs).logits)


class Adapted(nn.Module):
    """As LoRA wraps a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("order", ["adapted first", "patched first"])
def test_adapters(patching, device, order):
    """Projections and head that are more than their weights are called; the head's logits are then formed."""
    model = model_of("LlamaForCausalLM")
    if order == "patched first":
        patching.patch_model(model, ("mlp", "loss"))
    for parent in (model.model.layers[0].mlp, model.model.layers[0].self_attn, model):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child))
    model = model.to(device).train()
    if order == "adapted first":
        assert counted(patching.patch_model(model, ("mlp", "loss")))["swiglu", "projections called"] == 1
    inputs = inputs_of(model)
    found = step(model, inputs)
    assert found[1] is not None
    patching.unpatch_model(model)
    expected = step(model, inputs)
    same(found[0], expected[0])
    same_gradients(found[2], expected[2])


@pytest.mark.parametrize("order", ["adapted first", "patched first"])
def test_lora(patching, device, order):
    """peft's: gradients of the adapters, and the model into which they are merged."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model, ops = model_of("LlamaForCausalLM"), ("mlp", "loss")
    if order == "patched first":
        patching.patch_model(model, ops)
    adapted = peft.get_peft_model(model, config).to(device).train()
    if order == "adapted first":
        patching.patch_model(model, ops)
    inputs = inputs_of(adapted)
    found = step(adapted, inputs)
    patching.unpatch_model(model)
    expected = step(adapted, inputs)
    same(found[0], expected[0])
    same_gradients(found[2], expected[2])
    assert found[2] and all("lora_" in name for name in found[2])
    report = patching.patch_model(model, ops)
    merged = adapted.merge_and_unload().eval()
    with torch.no_grad():
        logits = merged(**inputs).logits
        patching.unpatch_model(merged)
        same(logits, merged(**inputs).logits)
    assert counted(report)["swiglu", "projections called"] == 1


@pytest.mark.parametrize("order", ["patched first", "offloaded first"])
def test_offload(patching, device, order):
    """accelerate's: a module's weights are there while its forward runs, and no longer."""
    accelerate = pytest.importorskip("accelerate")
    model = model_of("LlamaForCausalLM", device).train()
    inputs = inputs_of(model)
    with torch.no_grad():
        expected = model(**inputs)
    if order == "offloaded first":
        accelerate.cpu_offload(model, execution_device=device)
    report = patching.patch_model(model)
    if order == "patched first":
        assert counted(report) == REPLACED["LlamaForCausalLM"]
        accelerate.cpu_offload(model, execution_device=device)
    else:
        assert {k.cls for k in report.kept if "set by something else" in k.why} == {"LlamaRMSNorm", "LlamaForCausalLM"}
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        same(model(**inputs).loss, expected.loss)
        same(model.eval()(**inputs).logits, expected.logits)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    patching.unpatch_model(model)
    with torch.no_grad():
        assert torch.equal(model.train().to(device)(**inputs).logits, expected.logits)


def test_loss(patching, device):
    """What callers may ask of the loss; logits where they ask for them."""
    model = model_of("LlamaForCausalLM", device).train()
    inputs = inputs_of(model)
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    asked = [{}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": shifted}]
    asked += [{"output_hidden_states": True}, {"attention_mask": torch.ones_like(inputs["input_ids"])}]
    expected = [model(**inputs, **more) for more in asked]
    unreturned = model(**inputs, return_dict=False)
    report = patching.patch_loss(model)
    assert counted(report) == {FUSED: 1, LOSS: 1}
    for more, e in zip(asked, expected):
        y = model(**inputs, **more)
        assert y.logits is None and type(y) is type(e) and (y.hidden_states is None) == (e.hidden_states is None)
        same(y.loss, e.loss)
    loss, logits = model(**inputs, return_dict=False)[:2]
    same(loss, unreturned[0])
    same(logits, unreturned[1])
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert model(**inputs).logits is not None
    handle.remove()
    assert model(input_ids=inputs["input_ids"]).logits is not None
    assert patching.patch_loss(model).replaced == []
    patching.unpatch_model(model)
    model.loss_function = lambda **_: torch.zeros(())
    (kept,) = [k for k in patching.patch_loss(model).kept if "cross_entropy: its" in k.why]
    assert kept.why == "as to cross_entropy: its loss_function was set by something else"
    patching.unpatch_model(model)


@pytest.mark.parametrize("name, scaling", [("Granite", {"logits_scaling": 8.0}), ("Cohere", {"logit_scale": 0.25})])
def test_scaled_logits(patching, device, name, scaling):
    config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS, **ENDS, **scaling)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device).train()
    inputs = inputs_of(model)
    expected = step(model, inputs)
    assert counted(patching.patch_loss(model)) == {FUSED: 1, LOSS: 1}
    found = step(model, inputs)
    same(found[0], expected[0])
    same_gradients(found[2], expected[2])


def test_rotary_is_of_the_file(patching, device):
    """Two models of a file share the function, until the last is unpatched; so do they where it is a plain function."""
    file = importlib.import_module("transformers.models.llama.modeling_llama")
    first, second = model_of("LlamaForCausalLM", device).eval(), model_of("LlamaForCausalLM", device).eval()
    inputs = inputs_of(first, labels=False)
    decorated = file.apply_rotary_pos_emb

    def plain(q, k, cos, sin, unsqueeze_dim=1):
        return type(decorated).forward(decorated, q, k, cos, sin, unsqueeze_dim)

    expected = first(**inputs).logits
    for function in {decorated, plain}:
        file.apply_rotary_pos_emb = function
        try:
            patching.patch_rotary(first)
            (name,) = [r.name for r in patching.patch_rotary(second).replaced]
            assert name == "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
            assert patching.patch_rotary(first).replaced == []
            ours = file.apply_rotary_pos_emb
            assert (ours is not function) == (function is plain)
            same(first(**inputs).logits, expected)
            patching.unpatch_model(first)
            assert file.apply_rotary_pos_emb is ours
            patching.unpatch_model(second)
            assert file.apply_rotary_pos_emb is function and "forward" not in vars(decorated)
        finally:
            file.apply_rotary_pos_emb = decorated


CLASSES = {  # modeling file, class, arguments -> how, or None where it is kept
    ("llama", "LlamaRMSNorm", 40): "rounded before the weight",
    ("olmo2", "Olmo2RMSNorm", 40): ONCE,
    ("gemma", "GemmaRMSNorm", 40): "1 + weight, rounded once",
    ("gemma3n", "Gemma3nRMSNorm", 40): ONCE,
    ("gpt_oss", "GptOssRMSNorm", 40): ONCE,
    ("llama4", "Llama4TextRMSNorm", 40): "rounded before the weight",
    ("idefics", "IdeficsRMSNorm", 40): "rounded to the weight's dtype",
    ("t5", "T5LayerNorm", 40): "rounded to the weight's dtype",
    ("cohere", "CohereLayerNorm", 40): ONCE,
    ("cohere", "CohereLayerNorm", (2, 20)): None,  # normalised by head, with a weight for all
    ("olmo", "OlmoLayerNorm", 40): ONCE,
    ("convnext", "ConvNextLayerNorm", 40): ONCE,
    ("qwen3_next", "Qwen3NextRMSNormGated", 40): "rounded before the weight, then gated",
    ("kimi_linear", "KimiLinearRMSNormGated", 40): "then gated, rounded once",
    ("mamba2", "MambaRMSNormGated", 40): "gated, then rounded before the weight",
    ("deepseek_v4", "DeepseekV4UnweightedRMSNorm",): None,  # the factor is rounded, then multiplied
}  # fmt: skip


def test_conventions(patching):
    for (file, cls, *args), how in CLASSES.items():
        module = getattr(importlib.import_module(f"transformers.models.{file}.modeling_{file}"), cls)(*args)
        report = patching.patch_model(module, ("rms_norm", "rms_norm_gated", "layer_norm"))
        assert [r.how for r in report.replaced] == ([] if how is None else [how]), cls
        assert [k.cls for k in report.kept] == ([cls] if how is None else []), cls


class Unlike:
    """Modules by names of others that they are not."""

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def norm(self, x):
            x = x.float()
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

        def forward(self, x):
            return self.weight * self.norm(x).type_as(x)

    class TwiceRMSNorm(RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    class BoundedRMSNorm(RMSNorm):
        def forward(self, x):
            return super().forward(x.clamp(-20, 20))

    class OtherEpsRMSNorm(RMSNorm):
        def norm(self, x):
            return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-7)

    class DetachedRMSNorm(RMSNorm):
        def forward(self, x):
            return self.weight.detach() * self.norm(x).type_as(x)

    class NoisyRMSNorm(RMSNorm):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x) * self.training)

    class GatedRMSNorm(RMSNorm):
        def forward(self, x, gate=None):
            return super().forward(x if gate is None else x * gate)

    class OneTokenRMSNorm(RMSNorm):
        def forward(self, x):
            return super().forward(x).squeeze(1)

    class ClippedGELU(nn.Module):
        def forward(self, x):
            return nn.functional.gelu(x).clamp(max=10)

    class MLP(nn.Module):
        def __init__(self, act_fn=nn.SiLU(), dropout=0.0, limit=None):  # noqa: B008
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 9), nn.Linear(8, 9), nn.Linear(9, 8)
            self.act_fn, self.dropout, self.limit = act_fn, nn.Dropout(dropout), limit

        def forward(self, x):
            gate = self.gate_proj(x).clamp(max=self.limit)
            return self.down_proj(self.dropout(self.act_fn(gate) * self.up_proj(x)))


@pytest.mark.parametrize(
    "make, why",
    [
        (Unlike.TwiceRMSNorm, "no kernel computes the same"),
        (Unlike.BoundedRMSNorm, "no kernel computes the same"),
        (Unlike.OtherEpsRMSNorm, "no kernel computes the same"),
        (Unlike.DetachedRMSNorm, "no kernel computes the same"),
        (Unlike.NoisyRMSNorm, "no kernel computes the same"),
        (Unlike.GatedRMSNorm, "its forward takes other arguments"),
        (Unlike.OneTokenRMSNorm, "no kernel computes the same"),
        (Unlike.ClippedGELU, "no kernel computes the same"),
        (lambda: nn.SiLU(inplace=True), "a small copy of it did not run: a view of a leaf Variable"),
        (lambda: Unlike.MLP(nn.ReLU(), limit=99), "no kernel computes the same"),
        (lambda: Unlike.MLP(dropout=0.1, limit=99), "no kernel computes the same"),
        (lambda: Unlike.MLP(limit=7), "no kernel computes the same"),
        (lambda: nn.Sequential(Unlike.RMSNorm(), nn.Linear(16, 16)), None),
        (lambda: Unlike.MLP(limit=99), None),
    ],
)
def test_what_is_not_sure_is_kept(patching, make, why):
    module = make()
    report = patching.patch_model(module)
    if why is None:
        assert len(report.replaced) == 1
        return
    kept = {k.cls: k.why for k in report.kept}
    assert kept[type(module).__name__].startswith(why) and "forward" not in vars(module)
    assert type(module).__name__ not in {r.cls for r in report.replaced}


def test_what_others_set_is_kept(patching):
    """A forward that a hook of accelerate, or another patch, has put there."""
    model = nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(16))
    model[0].forward = functools.partial(nn.LayerNorm.forward, model[0])
    report = patching.patch_model(model)
    assert [r.name for r in report.replaced] == ["1"] and report.kept[0].why == "its forward was set by something else"
    assert patching.patch_model(model).kept[1].why == "it is patched already"
    # accelerate wraps what it finds, and puts it back later
    model[1]._old_forward, model[1].forward = (
        model[1].forward,
        functools.partial(lambda m, x: m._old_forward(x), model[1]),
    )
    x = torch.randn(3, 16)
    before = model(x)
    patching.unpatch_model(model)
    assert model[1]._old_forward.__func__ is nn.LayerNorm.forward
    assert torch.allclose(model(x), before, atol=1e-5)


def test_contexts_nest(patching):
    model = nn.Sequential(nn.LayerNorm(16), nn.GELU())
    with patching.patch_layer_norm(model):
        with patching.patch_model(model) as inner:
            assert [r.op for r in inner.replaced] == ["gelu"]
        assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
    assert "forward" not in vars(model[0])


def test_self_check(patching, device):
    """A module whose weights, not its class, make it another: found with its own weights, and all is undone."""

    class LayerNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * (2 if self.weight[0] == 7 else 1)

    model = nn.Sequential(nn.GELU(), LayerNorm(16)).to(device)
    with patching.patch_model(model, self_check=True) as report:
        assert len(report.replaced) == 2
    model[1].weight.data[0] = 7
    with pytest.raises(RuntimeError, match="layer_norm must agree with LayerNorm on random input, got another result"):
        patching.patch_model(model, self_check=True)
    assert not any("forward" in vars(m) for m in model)


def test_whatever_the_caller_is_in(patching, device):
    """Not read or moved: random numbers, modes, default dtype and device; weights may be meta."""
    model = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.SiLU(), Unlike.RMSNorm())
    state = torch.get_rng_state()
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.device("meta")):
        with context(), torch.autocast("cpu"):
            assert len(patching.patch_model(model).replaced) == 4
        patching.unpatch_model(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert len(patching.patch_model(copy.deepcopy(model).to("meta")).replaced) == 4
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["DiT", "UNet"])
def test_diffusers(patching, device, name):
    pytest.importorskip("diffusers")
    if name == "DiT":
        block = importlib.import_module("diffusers.models.attention").BasicTransformerBlock
        model = block(32, 2, 16, attention_bias=True, activation_fn="geglu")
        args = (tensor((2, 5, 32), device=device),)
        expected = {("layer_norm", ONCE): 2, ("mul_and_gelu", "projection called"): 1}
    else:
        blocks = importlib.import_module("diffusers.models.unets.unet_2d_blocks")
        model = blocks.UNetMidBlock2D(16, temb_channels=8, resnet_groups=4)
        args = (tensor((2, 16, 4, 4), device=device), tensor((2, 8), device=device))
        expected = {("group_norm", ONCE): 5, ("silu", ONCE): 2}
    model = model.to(device)
    runs = []
    for patched in (False, True):
        if patched:
            found = counted(patching.patch_model(model, self_check=True))
            assert {k: v for k, v in found.items() if k in expected} == expected
        model.zero_grad()
        y = model(*args)
        y.square().mean().backward()
        runs.append((y.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}))
    same(runs[1][0], runs[0][0])
    same_gradients(runs[1][1], runs[0][1])


def test_bad_input(patching):
    with pytest.raises(TypeError, match="patch_model: model must be a torch.nn.Module, got int"):
        patching.patch_model(3)
    with pytest.raises(ValueError, match="patch_model: ops must be of 'mlp', .* got 'softmax'"):
        patching.patch_model(nn.GELU(), ["gelu", "softmax"][1:])
    assert isinstance(sys.modules[patching.__name__], types.ModuleType)
