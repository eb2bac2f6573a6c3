"""Whole models on this package: small ones with random weights, each held against itself untouched.

Results and every gradient against the untouched model in float64, training step by step, generation token by token.
In the interpreter, which costs seconds a model, fewer models train, and for fewer steps.
"""

import collections
import copy
import os
from typing import NamedTuple

import pytest
import torch
from _inputs import few
from _numerics import assert_close
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from torch import nn

transformers = pytest.importorskip("transformers")

REPO = os.environ["PORTABLE_KERNELS_TESTED"].split("@")[0]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MODES = (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE)

# Keys of a kernel mapping -> layers. All but one have the key's own name.
LAYERS = {
    name: name
    for name in (
        "RMSNorm", "RMSNormZeroCentered", "LayerNorm", "GroupNorm", "SiLU", "GeLU", "GeluTanh", "NewGELU",
        "SwiGLUMLP", "GeGLUMLP", "TorchRMSNorm", "DiffusersRMSNorm", "DiffusersGEGLU",
    )
}  # fmt: skip
LAYERS["rotary_pos_emb"] = "apply_rotary_transformers"


class Case(NamedTuple):
    build: object  # () -> model
    named: object  # () -> {class that does not carry a name: (key, condition or None)}
    replaced: dict  # key -> how many modules have this package's forward
    decoder: bool = False
    attention: bool = False  # by name


def exactly(cls):
    """Subclasses inherit the name and have a forward of their own."""
    return lambda module: type(module) is cls


SMALL = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip


def decoder(kind, **options):
    def build():
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model

    return build


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model


def bert():
    options = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
    config = transformers.BertConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    return transformers.BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2, num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification._from_config(config, attn_implementation="sdpa")


class Flux(nn.Module):
    """A diffusion transformer of one double and one single block, called with tensors alone."""

    def __init__(self):
        from diffusers import FluxTransformer2DModel

        super().__init__()
        self.model = FluxTransformer2DModel(
            patch_size=1, in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
        )  # fmt: skip

    def forward(self, hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids):
        return self.model(
            hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, return_dict=False
        )[0]


class LTX(nn.Module):
    """A video transformer whose block norms have no weights."""

    def __init__(self):
        from diffusers import LTXVideoTransformer3DModel

        super().__init__()
        self.model = LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_layers=1, attention_head_dim=16, num_attention_heads=2,
            cross_attention_dim=32, caption_channels=16,
        )  # fmt: skip

    def forward(self, hidden_states, encoder_hidden_states, timestep, encoder_attention_mask):
        return self.model(
            hidden_states, encoder_hidden_states, timestep, encoder_attention_mask, 2, 2, 2, return_dict=False
        )[0]


def unet_block():
    from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2DCrossAttn

    return UNetMidBlock2DCrossAttn(
        32, 16, num_layers=1, resnet_groups=8, num_attention_heads=2, cross_attention_dim=16, use_linear_projection=True
    )


def diffusers_norm():
    from diffusers.models.normalization import RMSNorm

    return RMSNorm


def diffusers_geglu():
    from diffusers.models.activations import GEGLU

    return GEGLU


def model_class(kind, name):
    return getattr(__import__(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}", fromlist=[name]), name)


def swiglu_mlp(kind):
    """No MLP carries a name, and an MLP has whichever activation its config names."""
    return {model_class(kind, f"{kind}MLP"): ("SwiGLUMLP", lambda module: module.config.hidden_act == "silu")}


def gemma3_classes():
    return {
        model_class("Gemma3", "Gemma3RMSNorm"): ("RMSNormZeroCentered", None),
        model_class("Gemma3", "Gemma3MLP"): (
            "GeGLUMLP",
            lambda module: module.config.hidden_activation == "gelu_pytorch_tanh",
        ),
    }


def layer_norm():
    return {nn.LayerNorm: ("LayerNorm", exactly(nn.LayerNorm))}


CASES = {
    "llama": Case(
        decoder("Llama"),
        lambda: swiglu_mlp("Llama"),
        {"RMSNorm": 5, "SwiGLUMLP": 2, "SiLU": 2, "rotary_pos_emb": 1},
        decoder=True,
        attention=True,
    ),
    "qwen3": Case(
        decoder("Qwen3"),
        lambda: swiglu_mlp("Qwen3"),
        {"RMSNorm": 9, "SwiGLUMLP": 2, "SiLU": 2, "rotary_pos_emb": 1},
        decoder=True,
        attention=True,
    ),
    "gemma3": Case(
        decoder(
            "Gemma3Text",
            sliding_window=5,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        gemma3_classes,
        {"RMSNormZeroCentered": 13, "GeGLUMLP": 2, "GeluTanh": 2, "rotary_pos_emb": 1},
        decoder=True,
        attention=True,
    ),
    "olmo2": Case(
        decoder("Olmo2"),
        lambda: swiglu_mlp("Olmo2"),
        {"RMSNorm": 9, "SwiGLUMLP": 2, "SiLU": 2, "rotary_pos_emb": 1},
        decoder=True,
        attention=True,
    ),
    # In float32 transformers looks for an nn.Linear to cast attention's operands to, and GPT-2's products are Conv1D.
    "gpt2": Case(gpt2, layer_norm, {"LayerNorm": 5, "NewGELU": 2}, decoder=True),
    "bert": Case(bert, layer_norm, {"LayerNorm": 5, "GeLU": 2}, attention=True),
    "vit": Case(vit, layer_norm, {"LayerNorm": 5, "GeLU": 2}, attention=True),
    "flux": Case(
        Flux,
        lambda: {
            nn.RMSNorm: ("TorchRMSNorm", exactly(nn.RMSNorm)),
            nn.GELU: ("GeluTanh", lambda module: module.approximate == "tanh"),
            nn.SiLU: ("SiLU", exactly(nn.SiLU)),
            **layer_norm(),
        },
        {"TorchRMSNorm": 6, "LayerNorm": 6, "GeluTanh": 1, "SiLU": 6},
    ),
    "ltx": Case(
        LTX,
        lambda: {
            diffusers_norm(): ("DiffusersRMSNorm", None),
            nn.RMSNorm: ("TorchRMSNorm", exactly(nn.RMSNorm)),
            **layer_norm(),
        },
        {"DiffusersRMSNorm": 2, "TorchRMSNorm": 4, "LayerNorm": 1},
    ),
    "unet": Case(
        unet_block,
        lambda: {
            nn.GroupNorm: ("GroupNorm", exactly(nn.GroupNorm)),
            nn.SiLU: ("SiLU", exactly(nn.SiLU)),
            diffusers_geglu(): ("DiffusersGEGLU", None),
            **layer_norm(),
        },
        {"GroupNorm": 5, "LayerNorm": 3, "DiffusersGEGLU": 1, "SiLU": 2},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small lose more to waiting threads than they gain: seconds become minutes on busy machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs_of(name, device):
    """Arguments of one call; a model with labels among them gives its loss."""
    if CASES[name].decoder:
        ids = torch.randint(3, 61, (2, 7)).to(device)
        return {"input_ids": ids, "labels": ids}
    normal = lambda *shape: torch.randn(shape).to(device)  # noqa: E731
    labels = torch.tensor([0, 2]).to(device)
    if name == "bert":
        mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3]).to(device)
        return {"input_ids": torch.randint(3, 61, (2, 7)).to(device), "attention_mask": mask, "labels": labels}
    if name == "vit":
        return {"pixel_values": normal(2, 3, 8, 8), "labels": labels}
    if name == "flux":
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(3.0)).to(device)
        time = torch.tensor([0.3, 0.7]).to(device)
        return dict(
            hidden_states=normal(2, 9, 8), encoder_hidden_states=normal(2, 5, 16), pooled_projections=normal(2, 16),
            timestep=time, img_ids=ids, txt_ids=torch.zeros(5, 3, device=device),
        )  # fmt: skip
    if name == "ltx":
        mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]).to(device)
        return dict(
            hidden_states=normal(2, 8, 8), encoder_hidden_states=normal(2, 5, 16),
            timestep=torch.tensor([300, 700]).to(device), encoder_attention_mask=mask,
        )  # fmt: skip
    return dict(hidden_states=normal(2, 32, 4, 4), temb=normal(2, 16), encoder_hidden_states=normal(2, 5, 16))


def run(model, inputs):
    """(result, loss): the model's own loss, or the mean square."""
    result = model(**inputs)
    if "labels" in inputs:
        return result.logits, result.loss
    return result, result.square().mean()


def step(model, inputs):
    """(result, loss, gradient of every parameter)."""
    model.zero_grad()
    result, loss = run(model, inputs)
    loss.backward()
    # A weight that did not take part has no gradient (flux: the last block's text stream).
    return result.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def losses(model, inputs, steps):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(model, inputs)[1]
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def widened(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.fixture
def name_classes(monkeypatch):
    """name_classes({class: (key, condition)}): as a user names classes that carry none, until the test ends."""

    def name(named):
        for cls, (key, condition) in named.items():
            for attribute in ("kernel_layer_name", "kernel_condition"):
                monkeypatch.setattr(cls, attribute, None, raising=False)  # so that the end of the test removes it
            replace_kernel_forward_from_hub(cls, key, condition)

    return name


def functions(model):
    """Functions that transformers made into modules, one for all models of the file they are in."""
    found = {}
    for module in model.modules():
        for function in getattr(module, "_kernel_funcs", {}).values():
            found[id(function)] = function
    return list(found.values())


@pytest.fixture
def restored():
    """restored(model): notes the model's functions; after the test they are transformers' own again."""
    noted = []
    yield lambda model: noted.extend(functions(model)) or model
    for function in noted:
        function.__dict__.pop("forward", None)


def mapping(device, keys=LAYERS):
    """What a user registers. With a network: version=1, which asks the Hub for the versions that there are."""
    kind = "rocm" if torch.version.hip else device.type
    return {key: {kind: LayerRepository(REPO, layer_name=LAYERS[key], revision="main")} for key in keys}


def replaced(model, kernel):
    """Key -> how many modules and functions have a forward of this package."""
    found = collections.Counter()
    for module in [*model.modules(), *functions(model)]:
        if getattr(module.forward, "__module__", "").startswith(kernel.__name__):
            found[type(module).kernel_layer_name] += 1
    return dict(found)


def kernelized(model, device, mode):
    kind = "rocm" if torch.version.hip else device.type
    with use_kernel_mapping(mapping(device), inherit_mapping=False):
        return kernelize(model, mode=mode, device=kind, use_fallback=False)


def rounded(gradients, oracle):
    """The root mean square error of all gradients, in ulps of each one's own root mean square."""
    shares = []
    for key, o in oracle.items():
        if o.abs().max() > rounding(oracle):  # the gradient of the bias of attention's keys is 0
            error = (gradients[key].double().cpu() - o.cpu()).square().mean() / o.cpu().square().mean()
            shares.append(error.item() / torch.finfo(torch.float32).eps ** 2)
    return (sum(shares) / len(shares)) ** 0.5


def rounding(gradients):
    """What is left of the largest where terms cancel."""
    return torch.finfo(torch.float32).eps * max(g.abs().max().item() for g in gradients.values())


def hold(name, mine, theirs, oracle):
    """No further from float64 than the policy allows, plus what the untouched model is off itself, in any of `theirs`.

    Single elements of a gradient, which has come through all layers, are off by 71 ulps in PyTorch alone, and others
    each time that sums are ordered otherwise (four decoders, six seeds, an H200; with these kernels 73): 128 each, as
    in test_patching.py. Together they tell: there 0.59 to 1.07 of the largest of PyTorch's ways, which differ by 1.55.
    """
    for i in (0, 1):
        slack = (theirs[0][i].double() - oracle[i]).abs().max().item()
        assert_close(mine[i], oracle[i], dim=None, slack=slack, name=name)
    assert mine[2].keys() == theirs[0][2].keys() == oracle[2].keys()
    for key, o in oracle[2].items():
        assert_close(mine[2][key], o, dim=None, ulps=128, slack=rounding(oracle[2]), name=f"{name}, gradient of {key}")
    ours, known = rounded(mine[2], oracle[2]), [rounded(t[2], oracle[2]) for t in theirs]
    assert ours <= 1.5 * max(known), f"{name}: gradients are off by {ours:.2f} ulps, PyTorch's by {known}"


def ways(model, inputs):
    """The untouched model's step in the ways that PyTorch has: with its own attention or plain, here or on the CPU."""
    found = [step(copy.deepcopy(model), inputs)]
    if hasattr(model, "set_attn_implementation"):
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("eager")
        found.append(step(plain, inputs))
    if next(model.parameters()).device.type != "cpu":
        found.append(step(copy.deepcopy(model).cpu(), {k: v.cpu() for k, v in inputs.items()}))
    return found


def built(name, device):
    if name in ("flux", "ltx", "unet"):
        pytest.importorskip("diffusers")
    return CASES[name].build().to(device)


@pytest.mark.parametrize("name", few(CASES, 3))
def test_model(kernel, device, name, name_classes, restored):
    """kernelize, and for decoders attention by name: results, gradients, training, generation."""
    case = CASES[name]
    model, inputs = restored(built(name, device).train()), inputs_of(name, device)
    steps = 20 if not INTERPRETED else 2 if name in ("llama", "unet") else 0

    # All that is asked of the untouched model comes first: functions are replaced for every model of a family.
    oracle = step(copy.deepcopy(model).double(), widened(inputs))
    theirs = ways(model, inputs)
    their_losses = losses(copy.deepcopy(model), inputs, steps)
    if case.decoder:
        prompt = dict(input_ids=inputs["input_ids"][:, :4], max_new_tokens=3 if INTERPRETED else 6, do_sample=False)
        their_tokens = copy.deepcopy(model).eval().generate(**prompt)

    name_classes(case.named())
    mine = kernelized(copy.deepcopy(model), device, Mode.TRAINING | Mode.TORCH_COMPILE)
    assert replaced(mine, kernel) == case.replaced
    if case.attention:
        mine.set_attn_implementation(f"{REPO}:flash_attn_func")
    hold(name, step(mine, inputs), theirs, oracle)
    if case.decoder:
        assert torch.equal(mine.eval().generate(**prompt), their_tokens)
        mine.train()
    my_losses = losses(mine, inputs, steps)
    assert not steps or their_losses[-1] < their_losses[0]
    torch.testing.assert_close(my_losses, their_losses, rtol=1e-4, atol=0)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode(kernel, device, mode, name_classes, restored):
    """One mapping without modes serves all four."""
    model, inputs = restored(built("llama", device)), inputs_of("llama", device)
    theirs = step(copy.deepcopy(model), inputs)
    name_classes(CASES["llama"].named())
    mine = kernelized(model, device, mode)
    assert replaced(mine, kernel) == CASES["llama"].replaced
    if Mode.TORCH_COMPILE in mode:
        torch._dynamo.reset()
        mine = torch.compile(mine, backend="aot_eager", fullgraph=True)
    if Mode.TRAINING not in mode:
        with torch.no_grad():
            torch.testing.assert_close(mine(**inputs).logits, theirs[0], atol=1e-5, rtol=1e-5)
        return
    result, _, gradients = step(mine, inputs)
    torch.testing.assert_close(result, theirs[0], atol=1e-5, rtol=1e-5)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[2][key.removeprefix("_orig_mod.")], atol=1e-5, rtol=1e-4)


@pytest.fixture
def any_device(device, monkeypatch):
    """transformers' KernelConfig takes no CPU, though kernelize does."""
    from transformers.utils import kernel_config

    if device.type == "cpu":
        known = kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES
        monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", [*known, "cpu"])


def config_of(keys, local):
    """A KernelConfig for this package by its name, or by the folder it is built in."""
    if local:
        path = os.environ["LOCAL_KERNELS"].partition("=")[2]
        entries = {key: f"{path}:{LAYERS[key]}" for key in keys}
    else:  # with a network: {"version": 1, "trust_remote_code": True}
        entries = {key: (f"{REPO}:{LAYERS[key]}", {"revision": "main"}) for key in keys}
    return transformers.KernelConfig(entries, use_local_kernel=local, inherit_mapping=False)


KEYS = ("RMSNorm", "SiLU", "rotary_pos_emb")
REPLACED = {"RMSNorm": 5, "SiLU": 2, "rotary_pos_emb": 1}


@pytest.mark.parametrize("local", [False, True], ids=["by name", "by folder"])
def test_kernel_config(kernel, device, any_device, restored, local):
    """Set while the model trains it serves training and inference; set in eval(), training goes without."""
    model, inputs = restored(built("llama", device)), inputs_of("llama", device)
    with torch.no_grad():
        before = model.eval()(**inputs).logits
    model.train().set_use_kernels(True, config_of(KEYS, local))
    assert replaced(model, kernel) == REPLACED
    with torch.no_grad():
        assert replaced(model.eval(), kernel) == REPLACED
        torch.testing.assert_close(model(**inputs).logits, before, atol=1e-5, rtol=1e-5)
    assert replaced(model.train(), kernel) == REPLACED

    model.eval().set_use_kernels(True, config_of(KEYS, local))
    assert replaced(model, kernel) == REPLACED
    assert replaced(model.train(), kernel) == {}
    assert replaced(model.eval(), kernel) == REPLACED


def test_kernel_config_takes_no_cpu(device):
    if device.type != "cpu":
        pytest.skip("for the CPU")
    with pytest.raises(ValueError, match="Only devices in .* are supported, got: cpu"):
        built("llama", device).set_use_kernels(True, config_of(["RMSNorm"], False))


def test_from_pretrained(kernel, device, any_device, restored, tmp_path):
    on = {}
    if device.type != "cpu":  # kernels are looked up for the device that the weights are loaded to
        pytest.importorskip("accelerate")
        on = {"device_map": device}
    model, inputs = built("llama", device).eval(), inputs_of("llama", device)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path,
        use_kernels=True,
        kernel_config=config_of(KEYS, False),
        attn_implementation=f"{REPO}:flash_attn_func",
        **on,
    )
    with torch.no_grad():
        found = loaded(**inputs).logits
    assert replaced(restored(loaded), kernel) == REPLACED
    for function in functions(model):
        function.__dict__.pop("forward", None)
    with torch.no_grad():
        torch.testing.assert_close(found, model(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_use_kernels_with_a_mapping_of_ones_own(kernel, device, monkeypatch, restored):
    from transformers.integrations import hub_kernels

    # transformers registers its own mapping, over what was registered before.
    monkeypatch.setattr(hub_kernels, "_KERNEL_MAPPING_CACHE", {})
    model = restored(built("llama", device))
    with use_kernel_mapping(mapping(device, KEYS), inherit_mapping=False):
        model.eval().use_kernels = True
        assert replaced(model, kernel) == REPLACED
        assert replaced(model.train(), kernel) == REPLACED


def test_functions_are_replaced_for_the_whole_family(kernel, device, restored):
    """transformers' rotary is one function for every model of its file; modules are each model's own."""
    first, second = restored(built("llama", device)), built("llama", device)
    with use_kernel_mapping(mapping(device, ["RMSNorm", "rotary_pos_emb", "SiLU"]), inherit_mapping=False):
        kernelize(first, mode=Mode.INFERENCE, device="rocm" if torch.version.hip else device.type, use_fallback=False)
    assert replaced(first, kernel) == REPLACED
    assert replaced(second, kernel) == {"rotary_pos_emb": 1}


def test_a_copy_of_a_kernelized_model_uses_its_own_weights(kernel, device, restored):
    model, inputs = restored(built("llama", device)).eval(), inputs_of("llama", device)
    with use_kernel_mapping(mapping(device, KEYS), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="rocm" if torch.version.hip else device.type, use_fallback=False)
    twin = copy.deepcopy(model)
    assert replaced(twin, kernel) == REPLACED and all(
        m.forward.__self__ is m for m in twin.modules() if "forward" in vars(m)
    )
    with torch.no_grad():
        before = model(**inputs).logits
        for p in model.parameters():
            p.zero_()
        assert torch.equal(twin(**inputs).logits, before)


@pytest.fixture
def bfloat16(device):
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    return torch.bfloat16


def test_gpt2_attention_in_16_bits(device, bfloat16):
    """By name it works where the model is not in float32."""
    model = gpt2().to(device, bfloat16).eval()
    ids = inputs_of("gpt2", device)["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        model.set_attn_implementation(f"{REPO}:flash_attn_func")
        torch.testing.assert_close(model(ids).logits, before, atol=0.05, rtol=0.05)


def test_kernelized_model_with_attention_compiles_whole(kernel, device, bfloat16, name_classes, restored):
    """In bfloat16: of float32 operands transformers warns, by a logger that breaks the graph."""
    model, inputs = restored(built("llama", device)).to(bfloat16), inputs_of("llama", device)
    before, _, gradients = step(copy.deepcopy(model), inputs)
    name_classes(CASES["llama"].named())
    mine = kernelized(model, device, Mode.TRAINING | Mode.TORCH_COMPILE)
    mine.set_attn_implementation(f"{REPO}:flash_attn_func")
    torch._dynamo.reset()
    found, _, mine_gradients = step(torch.compile(mine, backend="aot_eager", fullgraph=True), inputs)
    scale = before.abs().max().item()
    torch.testing.assert_close(found, before, atol=2**-6 * scale, rtol=0)
    for key, gradient in mine_gradients.items():
        theirs = gradients[key.removeprefix("_orig_mod.")]
        torch.testing.assert_close(gradient, theirs, atol=2**-4 * theirs.abs().max().item(), rtol=0)
