"""The build and its checks: what tools/build_local.py makes is what kernel-builder would accept and users load."""

import ast
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from kernels import get_kernel, get_local_kernel, has_kernel
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata
from kernels.compat import tomllib

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools").is_dir():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)

import build_local  # noqa: E402
from build_local import BuildError, build  # noqa: E402

TINY_TOML = """\
[general]
name = "tiny-kernel"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cuda", "rocm", "xpu", "cpu"]

[torch-noarch]
"""
TINY_INIT = """\
import torch

from ._ops import add_op_namespace_prefix, ops

__all__ = ["scaled"]


@torch.library.custom_op(add_op_namespace_prefix("scaled"), mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return FACTOR * x


@scaled.register_fake
def _(x):
    return torch.empty_like(x)
"""


@pytest.fixture(autouse=True)
def once(request):
    """In the interpreter, only what computes with this package's kernels is worth a second run."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "built" not in request.fixturenames:
        pytest.skip("the same with and without Triton's interpreter")


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def tiny(tmp_path):
    """A kernel repository of one op, x -> 2 x."""
    files = {"build.toml": TINY_TOML, "torch-ext/tiny_kernel/__init__.py": TINY_INIT.replace("FACTOR", "2")}
    return write(tmp_path / "tiny", files)


@pytest.fixture
def not_loaded(monkeypatch):
    """For builds whose loading is not the point: it takes seconds."""
    monkeypatch.setattr(build_local, "check_loads", lambda variants: None)


@pytest.fixture
def built():
    """The build of this repository that all tests load."""
    return Path(os.environ["LOCAL_KERNELS"].partition("=")[2])


def metadata(variant):
    return Metadata.read_from_file(variant / "metadata.json")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def run_python(script, *arguments, **environment):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


# this repository


def test_build_toml_is_accepted_and_says_what_it_should():
    backends = Build.open(ROOT).general.backends
    assert backends == [Backend.CUDA, Backend.ROCm, Backend.XPU, Backend.CPU]
    toml = tomllib.loads((ROOT / "build.toml").read_text())
    assert toml["general"]["name"] == "portable-kernels"
    assert toml["general"]["version"] == 1
    assert toml["general"]["edition"] == 5
    assert toml["general"]["license"] == "Apache-2.0"
    assert toml["general"]["hub"] == {"repo-id": "org/portable-kernels"}
    assert toml["torch-noarch"] == {"pyext": ["py", "json"]}


def test_repository_builds_for_every_backend(built):
    package = ROOT / "torch-ext" / "portable_kernels"
    sources = {name for name in names(package) if name.endswith((".py", ".json"))} - {"_ops.py"}
    assert {variant.name for variant in built.iterdir()} == {"torch-cuda", "torch-rocm", "torch-xpu", "torch-cpu"}
    for variant in built.iterdir():
        assert set(names(variant)) == sources | {"_ops.py", "metadata.json"}
        said = metadata(variant)
        backend = variant.name[len("torch-") :]
        assert (str(said.name), said.version, said.license) == ("portable-kernels", 1, "Apache-2.0")
        assert str(said.backend.backend_type) == backend
        assert said.id.startswith(f"_portable_kernels_{backend}_") and said.id.isidentifier()
        assert said.python_depends == []
        said.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_card_renders_with_kernel_builders_variables():
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = template.from_string((ROOT / "CARD.md").read_text())
    variables = {
        "repo_id": "org/portable-kernels",
        "version": 1,
        "functions": ["softmax", "rms_norm"],
        "layers": ["RMSNorm"],
        "has_benchmark": False,
        "upstream": [],
        "source": None,
        "license": "apache-2.0",
    }
    card = template.render(variables)
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert 'get_kernel("org/portable-kernels", version=1' in card
    assert "kernel.softmax(x, -1)" in card
    assert "- `RMSNorm`\n" in card and "- `rms_norm`\n" in card
    assert "{%" not in card and "{{" not in card
    template.render({**variables, "functions": None, "layers": None})


def test_the_build_runs_on_the_oldest_python_with_kernels():
    ast.parse((ROOT / "tools" / "build_local.py").read_text(), feature_version=(3, 9))


# what is built


@pytest.mark.parametrize(
    "backend, torch_build",
    [
        ("cuda", {"cuda": "13.0"}),
        ("rocm", {"hip": "7.1"}),
        ("xpu", {"xpu": "20260000"}),
        ("metal", {"mps": True}),
        ("cpu", {}),
    ],
)
def test_torchs_build_names_the_namespace(backend, torch_build, monkeypatch):
    version = types.SimpleNamespace(**{"cuda": None, "hip": None, "xpu": None, **torch_build})
    mps = types.SimpleNamespace(is_available=lambda: "mps" in torch_build)
    accelerator = types.SimpleNamespace(current_accelerator=lambda: None)
    namespace = f"_tiny_kernel_{backend}_abc1234"
    fake = types.ModuleType("torch")
    fake.version, fake.backends, fake.accelerator = version, types.SimpleNamespace(mps=mps), accelerator
    fake.ops = types.SimpleNamespace(**{namespace: "the ops"})
    monkeypatch.setitem(sys.modules, "torch", fake)
    module = {}
    exec(build_local.OPS_TEMPLATE.format(module="tiny_kernel", unique_id="abc1234"), module)
    assert module["ops"] == "the ops"
    assert module["add_op_namespace_prefix"]("scaled") == f"{namespace}::scaled"


@pytest.mark.parametrize(
    "pyext, taken",
    [
        ("", ["__init__.py", "stubs.pyi"]),
        ('pyext = ["py", "json"]', ["__init__.py", "configs/plan.json"]),
    ],
)
def test_only_files_that_pyext_admits_are_taken(tiny, tmp_path, not_loaded, pyext, taken):
    package = "torch-ext/tiny_kernel"
    others = ["stubs.pyi", "configs/plan.json", "notes.md", "data", "__pycache__/a.py", "_ops.py"]
    write(tiny, {f"{package}/{name}": "" for name in others})
    write(tiny, {"build.toml": TINY_TOML + pyext})
    out = build(tiny, tmp_path / "out")
    assert names(out / "torch-cpu") == sorted([*taken, "_ops.py", "metadata.json"])
    assert (out / "torch-cpu" / "_ops.py").read_text() != ""  # the generated one, not the one left in the source


@pytest.mark.parametrize("words", ['["triton"]', '[\n    "cuda",\n    "triton",  # everything\n]', "['triton', 'cpu']"])
def test_triton_as_a_backend_means_cuda_rocm_xpu(tiny, tmp_path, not_loaded, capsys, words):
    write(tiny, {"build.toml": TINY_TOML.replace('["cuda", "rocm", "xpu", "cpu"]', words)})
    with pytest.raises(ValueError, match="triton"):
        Build.open(tiny)  # the reason for the word of warning
    out = build(tiny, tmp_path / "out")
    expected = {"torch-cuda", "torch-rocm", "torch-xpu"} | ({"torch-cpu"} if "cpu" in words else set())
    assert {variant.name for variant in out.iterdir()} == expected
    assert 'write backends = ["cuda", "rocm", "xpu"]' in capsys.readouterr().err


def test_a_backend_taken_out_leaves_no_old_build(tiny, tmp_path, not_loaded):
    out = build(tiny, tmp_path / "out")
    write(tiny, {"build.toml": TINY_TOML.replace('"xpu", ', "")})
    build(tiny, out)
    assert sorted(variant.name for variant in out.iterdir()) == ["torch-cpu", "torch-cuda", "torch-rocm"]


# ids and provenance


def commit(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "--no-gpg-sign", "-m", "test"]):
        subprocess.run(["git", "-C", folder, *command], env=environment, check=True)
    head = ["git", "-C", folder, "rev-parse", "HEAD"]
    return subprocess.run(head, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def built_id(source, out):
    said = metadata(build(source, out) / "torch-cpu")
    return said.id[len("_tiny_kernel_cpu_") :], said.provenance


def test_id_without_git_follows_the_contents(tiny, tmp_path, not_loaded, monkeypatch):
    first, provenance = built_id(tiny, tmp_path / "out")
    assert provenance is None
    assert built_id(tiny, tmp_path / "out")[0] == first
    monkeypatch.setenv("PATH", "")  # no git at all
    assert built_id(tiny, tmp_path / "out") == (first, None)
    write(tiny, {"torch-ext/tiny_kernel/more.py": ""})
    second, _ = built_id(tiny, tmp_path / "out")
    (tiny / "torch-ext/tiny_kernel/more.py").rename(tiny / "torch-ext/tiny_kernel/other.py")
    third, _ = built_id(tiny, tmp_path / "out")
    assert len({first, second, third}) == 3


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_id_with_git_is_the_commit_and_more_where_the_tree_is_dirty(tiny, tmp_path, not_loaded):
    out = tmp_path / "out"
    head = commit(tiny)
    write(tiny, {"README.md": "", "torch-ext/tiny_kernel/__pycache__/a.pyc": ""})  # neither is built
    clean, provenance = built_id(tiny, out)
    assert clean == head[:7]
    assert (provenance.kernel.commit, provenance.kernel.dirty) == (head, False)

    write(tiny, {"torch-ext/tiny_kernel/__init__.py": TINY_INIT.replace("FACTOR", "3")})
    changed, provenance = built_id(tiny, out)
    assert changed.startswith(f"{head[:7]}_") and provenance.kernel.dirty

    write(tiny, {".gitignore": "more.py\n", "torch-ext/tiny_kernel/__init__.py": TINY_INIT.replace("FACTOR", "2")})
    write(tiny, {"torch-ext/tiny_kernel/more.py": ""})  # ignored by git, taken by the build
    ignored, provenance = built_id(tiny, out)
    assert provenance.kernel.dirty and len({clean, changed, ignored}) == 3


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_a_repository_around_the_source_says_nothing_of_it(tiny, tmp_path, not_loaded):
    write(tmp_path, {".gitignore": "tiny\n"})
    commit(tmp_path)
    assert built_id(tiny, tmp_path / "out")[1] is None


# every check fails on what it is there for


def test_package_without_init_is_refused(tiny, tmp_path):
    (tiny / "torch-ext/tiny_kernel/__init__.py").unlink()
    with pytest.raises(BuildError, match=r"__init__\.py must exist"):
        build(tiny, tmp_path / "out")


def test_nested_package_is_refused(tiny, tmp_path):
    (tiny / "torch-ext/tiny_kernel/tiny_kernel").mkdir()
    with pytest.raises(BuildError, match="tiny_kernel must not exist"):
        build(tiny, tmp_path / "out")


@pytest.mark.parametrize(
    "decorator",
    [
        '@torch.library.custom_op("tiny::bad", mutates_args=())',
        "@triton_op(NAME, mutates_args={})",
        '@prefix("bad").custom_op(prefix("bad"))',
        '@bad.register_kernel("cpu")',
        '@torch.library.register_fake("tiny::bad")',
    ],
)
@pytest.mark.parametrize("path", ["torch-ext/tiny_kernel/more.py", "tests/test_more.py"])
def test_registration_outside_the_namespace_is_refused(tiny, tmp_path, decorator, path):
    write(tiny, {path: f"{decorator}\ndef bad(x):\n    return x\n"})
    with pytest.raises(BuildError, match=rf"add_op_namespace_prefix(?s:.*){path}:2? ?\d* ?bad"):
        build(tiny, tmp_path / "out")


@pytest.mark.parametrize(
    "decorator",
    [
        '@torch.library.custom_op(_ops.add_op_namespace_prefix("good"), mutates_args=())',
        '@triton_op(add_op_namespace_prefix("good"), mutates_args={})',
        '@torch.library.register_kernel(add_op_namespace_prefix("good"), "cpu")',
        "@good.register_fake",
        "@functools.lru_cache(None)",
    ],
)
def test_registration_inside_the_namespace_passes(tiny, decorator):
    write(tiny, {"torch-ext/tiny_kernel/more.py": f"{decorator}\ndef good(x):\n    return x\n"})
    build_local.check_registrations(tiny)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda said: said.pop("version"), "version"),
        (lambda said: said.pop("id"), "id"),
        (lambda said: said.update({"python-depends": "torch"}), "torch"),
        (lambda said: said.update({"backend": {"type": "triton"}}), "triton"),
        (lambda said: said.pop("digest"), "the digest is missing"),
        (lambda said: said["digest"]["files"].pop("__init__.py"), "__init__.py"),
    ],
)
def test_bad_metadata_is_refused(tiny, tmp_path, not_loaded, change, message):
    variant = build(tiny, tmp_path / "out") / "torch-cpu"
    build_local.check_metadata(variant)
    said = json.loads((variant / "metadata.json").read_text())
    change(said)
    (variant / "metadata.json").write_text(json.dumps(said))
    with pytest.raises(BuildError, match=f"torch-cpu/metadata.json: (?s:.*){message}"):
        build_local.check_metadata(variant)


def test_a_changed_file_does_not_fit_the_digest(tiny, tmp_path, not_loaded):
    variant = build(tiny, tmp_path / "out") / "torch-cpu"
    write(variant, {"__init__.py": "changed"})
    with pytest.raises(BuildError, match="torch-cpu/metadata.json"):
        build_local.check_metadata(variant)


def test_bytecode_is_refused(tiny, tmp_path, not_loaded):
    variant = build(tiny, tmp_path / "out") / "torch-cpu"
    build_local.check_bytecode(variant)
    write(variant, {"__pycache__/a.cpython-311.pyc": ""})
    with pytest.raises(BuildError, match="bytecode must not be published"):
        build_local.check_bytecode(variant)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("import torch\ntorch.cuda.get_device_properties(0)\n", "with-triton where no GPU"),
        ("from tiny_kernel import _ops\n", "No module named 'tiny_kernel'"),
        ("import sys\nif sys.modules.get('triton', 0) is None:\n    import triton\n", "torch-cpu without-triton"),
    ],
    ids=["asks the GPU", "absolute import", "cpu needs triton"],
)
def test_a_package_that_does_not_load_is_refused_and_the_build_before_stays(tiny, tmp_path, fault, message):
    out = write(tmp_path / "out", {"torch-cpu/__init__.py": "the build before"})
    write(tiny, {"torch-ext/tiny_kernel/__init__.py": fault + TINY_INIT.replace("FACTOR", "2")})
    with pytest.raises(BuildError, match=message):
        build(tiny, out)
    assert names(out) == ["torch-cpu/__init__.py"]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("edition = 5", "edition = 5\ndescription = 1", "description"),
        ('"cpu"]', '"quantum"]', "quantum"),
        ("[torch-noarch]", '[torch]\nsrc = ["a.cpp"]', "no .torch-noarch."),
        ("[torch-noarch]", '[torch-noarch]\ncuda_capabilities = ["9.0"]', "only kernel-builder can build it"),
    ],
)
def test_build_toml_that_cannot_be_built_is_refused(tiny, tmp_path, old, new, message):
    write(tiny, {"build.toml": TINY_TOML.replace(old, new)})
    with pytest.raises(BuildError, match=message) as raised:
        build(tiny, tmp_path / "out")
    assert str(tiny) in str(raised.value)


def test_command_line(tiny, tmp_path):
    command = [sys.executable, ROOT / "tools" / "build_local.py", tiny]
    done = subprocess.run([*command, "--out", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "out" / "torch-rocm") == ["__init__.py", "_ops.py", "metadata.json"]
    (tiny / "torch-ext/tiny_kernel/__init__.py").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "must exist" in done.stderr and "Traceback" not in done.stderr


# what users load


def test_variants_and_versions_live_in_one_process(tiny, tmp_path, not_loaded):
    loaded = []
    for factor in (2, 3):
        write(tiny, {"torch-ext/tiny_kernel/__init__.py": TINY_INIT.replace("FACTOR", str(factor))})
        out = build(tiny, tmp_path / f"out{factor}")
        loaded += [(factor, get_local_kernel(variant)) for variant in sorted(out.iterdir())]
    assert len({kernel.__name__ for _, kernel in loaded}) == 8
    x = torch.arange(4.0)
    for factor, kernel in loaded:
        # By name: variants of one source share it, and what the later registration replaced is freed memory.
        assert torch.equal(kernel.ops.scaled(x), factor * x)
        compiled = torch.compile(lambda x, ops=kernel.ops: ops.scaled(x), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), factor * x)


REAL_VARIANTS = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel

kernels = [get_local_kernel(Path(variant)) for variant in sys.argv[1:]]
assert len({kernel.__name__ for kernel in kernels}) == len(kernels)
devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
for device in devices:
    x = torch.randn(4, 33, device=device)
    for kernel in kernels:
        eager = kernel.rms_norm(x)
        compiled = torch.compile(kernel.rms_norm, backend="eager", fullgraph=True)(x)
        for y in (eager, compiled):
            torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (33,), eps=1e-6))
print("answered", len(kernels))
"""


def test_variants_and_versions_of_this_repository_live_in_one_process(built, tmp_path, not_loaded):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "torch-ext", other / "torch-ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "build.toml", other)
    write(other, {"torch-ext/portable_kernels/_another_version.py": ""})
    variants = [*sorted(built.iterdir()), *sorted(build(other, tmp_path / "out").iterdir())]
    done = run_python(REAL_VARIANTS, *variants)
    assert done.stdout.strip() == "answered 8", done.stderr


def test_local_kernels_serves_has_kernel_and_get_kernel(tiny, not_loaded, monkeypatch):
    build(tiny, tiny / "build")
    for path in (tiny, tiny / "build"):  # a repository, or the folder of its variants
        monkeypatch.setenv("LOCAL_KERNELS", f"org/tiny-kernel={path}")
        assert has_kernel("org/tiny-kernel", version=1)
        kernel = get_kernel("org/tiny-kernel", version=1)
        assert torch.equal(kernel.scaled(torch.ones(2)), torch.full((2,), 2.0))


def test_has_kernel_is_false_where_no_variant_fits(tiny, not_loaded, monkeypatch):
    write(tiny, {"build.toml": TINY_TOML.replace('["cuda", "rocm", "xpu", "cpu"]', '["neuron"]')})
    build(tiny, tiny / "build")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/tiny-kernel={tiny}")
    assert not has_kernel("org/tiny-kernel", version=1)


OFFLINE = """
import torch
from kernels import get_kernel, has_kernel

assert has_kernel("org/portable-kernels", version=1)
kernel = get_kernel("org/portable-kernels", version=1)
x = torch.randn(4, 33)
torch.testing.assert_close(kernel.rms_norm(x), torch.nn.functional.rms_norm(x, (33,), eps=1e-6))
print(kernel.__file__)
"""


def test_get_kernel_offline_from_the_hubs_cache(built, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = write(tmp_path / "kernels--org--portable-kernels", {"refs/v1": revision})
    shutil.copytree(built, repository / "snapshots" / revision / "build")
    done = run_python(OFFLINE, KERNELS_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(repository))
