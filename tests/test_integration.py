"""docs/integration.md: every Python block runs as it is written, offline, from a cache made by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "integration.md"
if not GUIDE.is_file():
    pytest.skip("kernel-builder's own test run has no docs/", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("test_models.py runs the same in the interpreter", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# What the blocks of a section have that they do not make.
LLAMA = """
import tempfile
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
model = transformers.LlamaForCausalLM(config)
path = tempfile.mkdtemp()
model.save_pretrained(path)
model = model.to(DEVICE)
ids = torch.randint(3, 61, (2, 7)).to(DEVICE)
inputs = {"input_ids": ids, "labels": ids}
before = model(**inputs).logits.detach()
"""
GIVEN = {
    "kernelize": """
import torch
from torch import nn
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(approximate="tanh"), nn.GELU()).to(DEVICE)
""",
    "patch_model": LLAMA,
    "transformers": LLAMA,
    "torch.compile": LLAMA
    + """
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
layers = {"RMSNorm": "RMSNorm", "SiLU": "SiLU", "rotary_pos_emb": "apply_rotary_transformers"}
mapping = {k: {KIND: LayerRepository("org/portable-kernels", layer_name=v, version=1)} for k, v in layers.items()}
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=KIND)
assert count(model) == 8
""",
    "diffusers": """
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2DCrossAttn
transformer = UNetMidBlock2DCrossAttn(32, 16, resnet_groups=8, num_attention_heads=2, cross_attention_dim=16)
""",
}
# Inductor takes a minute for what is not in question here: that graphs are whole, forward and backward.
SETUP = """
import functools
import torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
def count(model):
    functions = {id(f): f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()}
    return sum("portable_kernels" in m.forward.__module__ for m in [*model.modules(), *functions.values()])
def same(model):
    torch.testing.assert_close(model.to(DEVICE)(**inputs).logits.detach(), before, atol=1e-5, rtol=1e-5)
"""
# (section, number of the block) -> what holds after it
AFTER = {
    ("patch_model", 0): "assert count(model) == 0; same(model)",
    ("kernelize", 0): "assert count(model) == 2, model",
    ("kernelize", 1): "assert count(model) == 0, model",
    ("transformers", 0): "assert count(model) == 8; same(model)",
    ("transformers", 1): "assert count(model) == 5; same(model)",
    ("transformers", 2): "assert count(model) == 10; same(model)",
    ("transformers", 3): "same(model)",
    ("diffusers", 0): "assert count(transformer) == 11, count(transformer)",
}


def blocks():
    """{section: [(line, code), ...]}"""
    found, section, start, lines = {}, None, None, []
    for number, line in enumerate(GUIDE.read_text().splitlines(), 1):
        if start is not None:
            if line == "```":
                found.setdefault(section, []).append((start, "\n".join(lines)))
                start, lines = None, []
            else:
                lines.append(line)
        elif line == "```python":
            start = number + 1
        elif line.startswith("## "):
            section = line[3:]
        assert start is not None or not line.startswith("```") or line == "```", f"line {number} is run by nobody"
    assert start is None
    return found


SECTIONS = blocks()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a machine without a network that has the package in the Hub's cache."""
    home = tmp_path_factory.mktemp("home")
    stored = home / "hub" / "kernels--org--portable-kernels"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "v1").write_text(COMMIT)
    (stored / "snapshots" / COMMIT).mkdir(parents=True)
    built = Path(os.environ["LOCAL_KERNELS"].partition("=")[2])
    (stored / "snapshots" / COMMIT / "build").symlink_to(built, target_is_directory=True)
    settings = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "KERNELS_CACHE")}
    return {**settings, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("section", SECTIONS)
def test_section(section, device, environment):
    kind = "rocm" if torch.version.hip else device.type
    program = [f"DEVICE, KIND = {str(device)!r}, {kind!r}", SETUP]
    if kind == "cpu" and section == "transformers":  # KernelConfig takes no CPU, as the guide says
        program.append("from transformers.utils import kernel_config as _known")
        program.append("_known.KERNELS_SUPPORTED_DEVICE_TYPES.append('cpu')")
    program.append(GIVEN.get(section, ""))
    for number, (line, code) in enumerate(SECTIONS[section]):
        code = code.replace('kind = "cuda"', f'kind = "{kind}"').replace('device="cuda"', f'device="{device.type}"')
        # Compiled with the guide's name and lines, so that a traceback points there.
        padded = "\n" * (line - 1) + code
        program.append(f"exec(compile({padded!r}, {str(GUIDE)!r}, 'exec'))")
        program.append(AFTER.get((section, number), ""))
    command = [sys.executable, "-c", "\n".join(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_promised_after_a_block_is_there():
    assert all(len(SECTIONS[section]) > number for section, number in AFTER)
    assert set(GIVEN) <= set(SECTIONS)


def test_every_layer_that_is_named_exists(kernel):
    text = GUIDE.read_text()
    named = set(re.findall(r'layer_name="(\w+)"', text)) | set(re.findall(r'\{repo\}:(\w+)"', text))
    named |= set(re.findall(r"`((?:\w+)(?:RMSNorm|GELU|GeLU|MLP|AndMul))`", text)) - {
        "RMSNorm",
        "GELU",
        "GEGLU",
        "SwiGLU",
    }
    layers = {name for name in named if name not in ("flash_attn_func",)}
    assert {"apply_rotary_transformers", "SwiGLUMLP"} <= layers
    assert all(hasattr(kernel.layers, name) for name in layers), layers
    for name in re.findall(r"kernel\.(\w+)\(", text):
        assert hasattr(kernel, name), name
