"""Layers as `kernelize` uses them: bound to torch's and transformers' modules, in every mode."""

import ast
import functools
import gc
import importlib
import inspect
import os
from pathlib import Path

import pytest
import torch
from _inputs import tensor
from _numerics import assert_close
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

transformers = pytest.importorskip("transformers")
ACT2FN = importlib.import_module("transformers.activations").ACT2FN

MODES = (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE)


class LlamaRMSNorm(nn.Module):
    """By the names that transformers uses; rounds before the weight."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        h = hidden_states.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(hidden_states.dtype)


class Olmo2RMSNorm(LlamaRMSNorm):
    """Rounds after the weight."""

    def forward(self, hidden_states):
        h = hidden_states.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * h).to(hidden_states.dtype)


class Qwen3_5RMSNorm(nn.Module):
    """Scales by 1 + weight."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(size)), 1e-6

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight.float())).type_as(x)


class ApplyRotary(nn.Module):
    """transformers' function, as its decorator wraps it."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))


class QuickGELUActivation(nn.Module):
    def forward(self, input):
        return input * torch.sigmoid(1.702 * input)


class Gated(nn.Module):
    """The packed activations, as vLLM and the Hub's activation layers name them."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return self.act(gate) * up


class MLP(nn.Module):
    """By the names that transformers uses."""

    def __init__(self, act_fn):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40, bias=False), nn.Linear(24, 40)
        self.down_proj, self.act_fn = nn.Linear(40, 24), act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SiluAndMul(Gated):
    pass


class GeluAndMul(Gated):
    pass


class GeluTanhAndMul(Gated):
    pass


def gated_by(name):
    return MLP(ACT2FN[name])


GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python", "gelu_python_tanh")

# Layer name -> a module that it replaces.
CASES = {
    "RMSNorm": [
        lambda: LlamaRMSNorm(24),
        lambda: Olmo2RMSNorm(24),
        lambda: nn.RMSNorm(24),
        lambda: nn.RMSNorm((4, 24)),
        lambda: nn.RMSNorm((4, 24), elementwise_affine=False),
    ],
    "RMSNormZeroCentered": [lambda: Qwen3_5RMSNorm(24)],
    "GroupNorm": [lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(4, 4, affine=False)],
    "LayerNorm": [
        lambda: nn.LayerNorm(24),
        lambda: nn.LayerNorm(24, elementwise_affine=False),
        lambda: nn.LayerNorm((4, 24), elementwise_affine=False),
        lambda: nn.LayerNorm((4, 24), bias=False),
    ],
    "Softmax": [lambda: nn.Softmax(), lambda: nn.Softmax(dim=1)],
    "SiLU": [lambda: nn.SiLU()],
    "GeLU": [lambda: nn.GELU()],
    "GeluTanh": [lambda: nn.GELU(approximate="tanh")],
    "NewGELU": [lambda: ACT2FN["gelu_new"]],
    "FastGELU": [lambda: ACT2FN["gelu_fast"]],
    "QuickGELU": [lambda: QuickGELUActivation()],
    "SwiGLUMLP": [lambda: MLP(ACT2FN["silu"]), lambda: MLP(nn.SiLU()), lambda: MLP(nn.functional.silu)],
    "GeGLUMLP": [
        lambda: MLP(nn.GELU("tanh")),
        lambda: MLP(nn.functional.gelu),
        *(functools.partial(gated_by, n) for n in GELUS),
    ],
    "Linear": [lambda: nn.Linear(24, 7), lambda: nn.Linear(24, 7, bias=False)],
    "SiluAndMul": [lambda: SiluAndMul(nn.functional.silu)],
    "GeluAndMul": [lambda: GeluAndMul(nn.functional.gelu)],
    "GeluTanhAndMul": [lambda: GeluTanhAndMul(lambda g: nn.functional.gelu(g, approximate="tanh"))],
}


def kernelized(module, layer, mode, device, monkeypatch):
    """`module` after kernelize, with a mapping such as a user writes; its class is restored afterwards."""
    cls = type(module)
    monkeypatch.setattr(cls, "forward", cls.forward)  # so that undoing also removes what is set below
    monkeypatch.setattr(cls, "kernel_layer_name", None, raising=False)
    replace_kernel_forward_from_hub(cls, layer)
    repo_id = os.environ["PORTABLE_KERNELS_TESTED"].split("@")[0]
    repo = LayerRepository(repo_id, layer_name=layer, revision="main")  # online: version=1
    kind = "rocm" if torch.version.hip else device.type
    with use_kernel_mapping({layer: {kind: repo}}, inherit_mapping=False):
        # Falls back for the activation modules inside an MLP, which carry layer names of their own.
        module = kernelize(module, mode=mode, device=kind, use_fallback=True)
    assert module.forward.__func__ is not cls.forward
    return module


def is_ours(module, kernel):
    return module.forward.__func__.__module__.startswith(kernel.__name__)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("layer", CASES)
def test_kernelize(kernel, device, monkeypatch, layer, mode, backend):
    for make in CASES[layer]:
        module = make().to(device)
        x = tensor((2, 4, 24), torch.float32, device).requires_grad_()
        before = module(x)
        dy = torch.randn_like(before)
        wanted = [x, *module.parameters()]
        gradients = torch.autograd.grad(before, wanted, dy)
        module = kernelized(module, layer, mode, device, monkeypatch)
        assert is_ours(module, kernel)
        compile_it = Mode.TORCH_COMPILE in mode and layer == "RMSNorm"
        after = (torch.compile(module, fullgraph=True, backend=backend) if compile_it else module)(x)
        assert after.dtype == before.dtype
        assert_close(after, before.double(), ulps=8)
        for a, b in zip(torch.autograd.grad(after, wanted, dy), gradients):
            assert_close(a, b.double(), dim=-1 if a.shape == x.shape else None, ulps=32)  # torch's error on ours
        if not isinstance(module, nn.RMSNorm):  # torch calls the argument x, transformers hidden_states
            name = list(inspect.signature(module.forward).parameters)[0]
            assert name in inspect.signature(make().forward).parameters
            assert torch.equal(module(**{name: x}), module(x))
        monkeypatch.undo()


def test_every_layer_has_a_case(kernel):
    layers = {n for n, v in vars(kernel.layers).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    elsewhere = {"apply_rotary_transformers", "RMSNormGated", "TorchRMSNorm", "Dropout"}
    elsewhere |= {"SoftmaxTopKRouter", "ForCausalLMLoss"}
    assert layers == {*CASES, *DIFFUSERS, *elsewhere}


DIFFUSERS = ("DiffusersRMSNorm", "DiffusersGEGLU", "DiffusersSwiGLU")


def diffusers_modules(layer):
    pytest.importorskip("diffusers")
    from diffusers.models.activations import GEGLU, SwiGLU
    from diffusers.models.normalization import RMSNorm

    if layer == "DiffusersGEGLU":
        return [GEGLU(24, 40), GEGLU(24, 40, bias=False)]
    if layer == "DiffusersSwiGLU":
        return [SwiGLU(24, 40)]
    modules = [RMSNorm(24, 1e-5), RMSNorm(24, 1e-5, elementwise_affine=False), RMSNorm(24, 1e-5, bias=True)]
    for module in modules:
        for p in module.parameters():
            p.data.copy_(torch.randn(24))
    return modules


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("layer", DIFFUSERS)
def test_kernelize_diffusers(kernel, device, monkeypatch, layer, mode):
    for module in diffusers_modules(layer):
        module = module.to(device)
        x = tensor((2, 4, 24), torch.float32, device).requires_grad_()
        before = module(x)
        dy, wanted = torch.randn_like(before), [x, *module.parameters()]
        gradients = torch.autograd.grad(before, wanted, dy)
        module = kernelized(module, layer, mode, device, monkeypatch)
        assert is_ours(module, kernel)
        assert_close(module(hidden_states=x), before.double(), ulps=8)
        for a, b in zip(torch.autograd.grad(module(x), wanted, dy), gradients):
            assert_close(a, b.double(), dim=-1 if a.shape == x.shape else None, ulps=64)  # torch's error on ours
        monkeypatch.undo()


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_diffusers_rounding(kernel, device, dtype, weight):
    """The dtype of diffusers and, but for the last bit of a few, its bits, whichever dtypes rows and weight have."""
    x = tensor((32, 24), dtype, device)
    for module in diffusers_modules("DiffusersRMSNorm"):
        module = module.to(device, weight)
        with torch.no_grad():
            expected, found = module(x), kernel.layers.DiffusersRMSNorm.forward(module, x)
        assert found.dtype == expected.dtype
        if found.dtype == torch.float32:
            assert_close(found, expected.double(), ulps=8)
        else:
            assert (found == expected).float().mean() >= 0.99


def test_torch_rms_norm_and_dropout(kernel, device, monkeypatch):
    x = tensor((2, 4, 24), torch.float32, device)
    for make in (lambda: nn.RMSNorm(24, eps=1e-6), lambda: nn.RMSNorm((4, 24)), lambda: nn.RMSNorm(24, None, False)):
        module = make().to(device)
        before = module(x)
        module = kernelized(module, "TorchRMSNorm", Mode.TRAINING, device, monkeypatch)
        assert is_ours(module, kernel)
        assert_close(module(x=x), before.double(), ulps=8)
        monkeypatch.undo()
    module = kernelized(nn.Dropout(0.25), "Dropout", Mode.TRAINING, device, monkeypatch)
    y = module(x)
    assert is_ours(module, kernel) and torch.allclose(y[y != 0], (x / 0.75)[y != 0]) and (y == 0).any()
    module.inplace, given = True, x.clone()
    assert module(given) is given and (given == 0).any()
    assert torch.equal(module.eval()(x.clone()), x)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernelize_rotary(kernel, device, monkeypatch, mode):
    q, k = (tensor((2, heads, 5, 8), torch.float32, device).requires_grad_() for heads in (4, 2))
    angles = torch.rand(2, 5, 4, device=device).repeat(1, 1, 2) * 6
    tables = angles.cos(), angles.sin()
    before = ApplyRotary()(q, k, *tables)
    grads = [torch.randn_like(t) for t in before]
    module = kernelized(ApplyRotary(), "apply_rotary_transformers", mode, device, monkeypatch)
    assert is_ours(module, kernel)
    after = module(q, k, *tables, unsqueeze_dim=1)
    for a, b in zip(after, before):
        assert_close(a, b.double(), ulps=8)
    for a, b in zip(torch.autograd.grad(after, (q, k), grads), torch.autograd.grad(before, (q, k), grads)):
        assert_close(a, b.double(), ulps=8)


def test_casting_by_class(kernel, device, monkeypatch):
    """Bit for bit in bfloat16: each class keeps the rounding of its own model."""
    x = tensor((32, 24), torch.bfloat16, device)
    for cls in (LlamaRMSNorm, Olmo2RMSNorm):
        module = cls(24).to(device, torch.bfloat16)
        before = module(x)
        after = kernelized(module, "RMSNorm", Mode.INFERENCE, device, monkeypatch)(x)
        assert (before == after).float().mean() >= 0.995
        monkeypatch.undo()


def test_mlps_call_what_they_find(kernel, device):
    """Projections that are more than their weights, and activations that are none of these."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(24, 2, bias=False), nn.Linear(2, 40, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    for layer, act_fn in ((kernel.layers.SwiGLUMLP, nn.SiLU()), (kernel.layers.GeGLUMLP, nn.GELU())):
        module = MLP(act_fn)
        module.gate_proj = Adapted(module.gate_proj)
        module, x = module.to(device), tensor((3, 24), device=device)
        assert_close(layer.forward(module, x), module(x).double(), ulps=32)
        traced = torch.compile(lambda m, x, layer=layer: layer.forward(m, x), fullgraph=True, backend="eager")
        assert torch.equal(traced(module, x), layer.forward(module, x))
    for layer, act_fn in (
        ("SwiGLUMLP", "gelu"),
        ("SwiGLUMLP", "relu"),
        ("GeGLUMLP", "silu"),
        ("GeGLUMLP", "quick_gelu"),
    ):
        with pytest.raises(TypeError, match=f"{layer}: act_fn must be .*, got {type(ACT2FN[act_fn]).__name__}"):
            getattr(kernel.layers, layer).forward(MLP(ACT2FN[act_fn]), x)


@pytest.mark.parametrize("how", ["plain", "bias", "autocast", "frozen", "checkpoint", "reentrant", "second"])
def test_mlps_form_the_product_again(kernel, device, on_kernels, how):
    """Bit for bit the gradients of the plain composition, and nothing of the product is kept for them."""
    from torch.utils.checkpoint import checkpoint

    module = MLP(nn.SiLU()).to(device)
    if how == "bias":
        module.down_proj = nn.Linear(40, 24).to(device)
    if how == "frozen":
        module.down_proj.requires_grad_(False)
    x = tensor((2, 3, 24), device=device).requires_grad_()
    kept = []
    module.down_proj.register_forward_pre_hook(lambda _, args: kept.append(StorageWeakRef(args[0].untyped_storage())))

    def plain(x):
        return module.down_proj(kernel.swiglu(module.gate_proj(x), module.up_proj(x)))

    def ours(x):
        return kernel.layers.SwiGLUMLP.forward(module, x)

    found = []
    for function in (plain, ours):
        with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
            if how in ("checkpoint", "reentrant"):
                y = checkpoint(function, x, use_reentrant=how == "reentrant")
            else:
                y = function(x)
        if how in ("plain", "bias", "autocast"):
            gc.collect()  # the interpreter's frames hold what they launched on
            assert kept[-1].expired() == (function is ours and on_kernels)
        learn = [x, *(p for p in module.parameters() if p.requires_grad)]
        if how == "reentrant":  # it forbids autograd.grad
            module.zero_grad()
            x.grad = None
            y.float().square().sum().backward()
            grads = [p.grad for p in learn]
        else:
            grads = torch.autograd.grad(y.float().square().sum(), learn, create_graph=how == "second")
        if how == "second":
            grads += torch.autograd.grad(sum(g.square().sum() for g in grads), learn)
        found.append(grads)
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_router(kernel, device, monkeypatch):
    """Of Qwen3.5: the same experts, and logits bit for bit."""
    models = importlib.import_module("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    config = importlib.import_module("types").SimpleNamespace(num_experts_per_tok=3, num_experts=9, hidden_size=24)
    for dtype in (torch.float32, torch.bfloat16):
        router = models.Qwen3_5MoeTopKRouter(config).to(device, dtype)
        router.weight.data.copy_(tensor((9, 24), dtype, device))
        x = tensor((2, 5, 24), dtype, device)
        logits, weights, experts = router(x)
        router = kernelized(router, "SoftmaxTopKRouter", Mode.TRAINING, device, monkeypatch)
        assert is_ours(router, kernel)
        ours = router(hidden_states=x)
        assert torch.equal(ours[0], logits) and torch.equal(ours[2], experts) and ours[1].dtype == weights.dtype
        assert_close(ours[1], weights.double(), ulps=8)
        monkeypatch.undo()
    router.e_score_correction_bias = None
    with pytest.raises(TypeError, match="router must be a softmax"):
        kernel.layers.SoftmaxTopKRouter.forward(router, x)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=("mean", "int", "tensor"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_causal_loss(kernel, device, dtype, items):
    """transformers' own, from logits and from hidden states; labels shifted here or by the caller."""
    expected_of = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss
    hidden, head = tensor((2, 6, 16), dtype, device), tensor((40, 16), dtype, device)
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    labels = torch.randint(40, (2, 6))
    labels[0, :3] = -100
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss_of = functools.partial(kernel.layers.ForCausalLMLoss.forward, nn.Module())
    for softcap in (None, 5.0):
        logits = hidden @ head.T
        if softcap:
            logits = torch.tanh(logits.float() / softcap) * softcap
        expected = expected_of(logits, labels, 40, items)
        gradients = torch.autograd.grad(expected, (hidden, head))
        for given in ({"labels": labels}, {"labels": None, "shift_labels": shifted}):
            fused = {"hidden_states": hidden, "lm_head_weight": head, "final_logit_softcapping": softcap}
            for more in (fused, {"logits": hidden @ head.T}):
                if softcap and more is not fused:
                    continue  # who gives logits has capped them
                loss = loss_of(**{"logits": None, "vocab_size": 40, "num_items_in_batch": items, **given, **more})
                assert loss.dtype == expected.dtype
                assert_close(loss, expected.double(), dim=None, ulps=32)
                for a, b in zip(torch.autograd.grad(loss, (hidden, head)), gradients):
                    assert_close(a, b.double(), dim=None, ulps=8 if dtype == torch.bfloat16 else 64)  # torch's on ours


def test_derived_classes_keep_their_rounding(kernel):
    """FSDP puts a class of its own, of another name, in the place of each module's."""
    module = Olmo2RMSNorm(24).to(torch.bfloat16)
    x = tensor((32, 24), torch.bfloat16)
    before = kernel.layers.RMSNorm.forward(module, x)
    module.__class__ = type("FSDPOlmo2RMSNorm", (Olmo2RMSNorm,), {})
    assert torch.equal(kernel.layers.RMSNorm.forward(module, x), before)


def test_rotary_keeps_dtypes(kernel, device):
    """OLMo 2's tables are float32, whatever its states are."""
    q, k = tensor((2, 4, 5, 8), torch.bfloat16, device), tensor((2, 2, 5, 8), torch.bfloat16, device)
    angles = torch.rand(2, 5, 4, device=device).repeat(1, 1, 2) * 6
    function = importlib.import_module("transformers.models.olmo2.modeling_olmo2").apply_rotary_pos_emb
    expected = function(q, k, angles.cos(), angles.sin())
    found = kernel.layers.apply_rotary_transformers.forward(None, q, k, angles.cos(), angles.sin())
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype and torch.equal(a, b)


def transformers_norms(layer="RMSNorm"):
    """The source of every class that transformers registers under the name of a layer."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if f'use_kernel_forward_from_hub("{layer}")' in source:
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and f'"{layer}"' in "".join(
                    ast.unparse(d).replace("'", '"') for d in node.decorator_list
                ):
                    node.decorator_list = []
                    yield node.name, ast.unparse(node)


def test_casting_table_is_transformers(internals):
    """The table in layers.py, held against the code of every RMSNorm that the installed transformers has."""
    if transformers.__version__ < "5.22":  # DeepseekV4RMSNorm rounded before the weight then
        pytest.skip("the table is that of transformers 5.22")
    layers, reference = internals("layers"), internals("rms_norm").rms_norm_reference
    x, seen = tensor((16, 40), torch.bfloat16), 0
    for name, source in transformers_norms():
        namespace = {"nn": nn, "torch": torch}
        exec(source, namespace)
        module = namespace[name](40).to(torch.bfloat16)
        module.weight.data.copy_(tensor((40,)))
        with torch.no_grad():
            expected = module(x)
            found = reference(x, module.weight, module.variance_epsilon, casting=layers._casting(type(module)))
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
        seen += 1
    assert seen > 100


def test_layers_refuse_another_width(kernel):
    for layer, module in (
        (kernel.layers.LayerNorm, nn.LayerNorm(7, elementwise_affine=False)),
        (kernel.layers.RMSNorm, nn.RMSNorm(7, elementwise_affine=False)),
    ):
        with pytest.raises(ValueError, match=r"x must end in \(7,\), got \(3, 8\)"):
            layer.forward(module, torch.randn(3, 8))


def test_gated_norms_are_transformers(kernel, device):
    """The layer, bound to every RMSNormGated that the installed transformers has, against its own forward."""
    from transformers.activations import ACT2FN

    x, gate = tensor((16, 40), torch.bfloat16, device), tensor((16, 40), torch.bfloat16, device)
    seen = 0
    for name, source in transformers_norms("RMSNormGated"):
        namespace = {"nn": nn, "torch": torch, "ACT2FN": ACT2FN}
        exec(source, namespace)
        module = namespace[name](40).to(device, torch.bfloat16)
        module.weight.data.copy_(tensor((40,)))
        with torch.no_grad():
            expected, found = module(x, gate), kernel.layers.RMSNormGated.forward(module, x, gate)
        assert found.dtype == expected.dtype and (found == expected).float().mean() >= 0.99, name
        seen += 1
    assert seen >= 5
