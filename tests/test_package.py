"""Rules that hold for the whole package, read from its sources. This is the registry: derived, never kept by hand."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_local import check_registrations

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "portable_kernels"
SOURCES = sorted(PACKAGE.glob("*.py"))
NO_FAMILY = {"layers", "patching"}  # public, but no ops of their own
HELPERS = {"report", "warmup"}  # functions that are no ops
MODULES = {"reductions"} & {p.stem for p in SOURCES}  # reached as kernel.reductions.sum: their names are builtins' too
FAMILIES = sorted(p.stem for p in SOURCES if not p.stem.startswith("_") and p.stem not in NO_FAMILY)


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_functions(path):
    return [n for n in tree(path).body if isinstance(n, ast.FunctionDef)]


def is_op(node):
    return any("custom_op" in ast.unparse(d) for d in node.decorator_list)


def is_kernel(node):
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def public_functions(family):
    return [
        n.name
        for n in defined_functions(PACKAGE / f"{family}.py")
        if not n.name.startswith("_") and not n.name.endswith("_reference") and not is_op(n) and not is_kernel(n)
    ]


def exported():
    (names,) = [
        ast.literal_eval(n.value)
        for n in tree(PACKAGE / "__init__.py").body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    return names


def test_exports_are_what_families_define():
    functions = [name for family in FAMILIES if family not in MODULES for name in public_functions(family)]
    assert len(functions) == len(set(functions))
    assert set(exported()) == {*functions, *MODULES, *NO_FAMILY, *HELPERS}
    assert exported()[0] == "softmax"  # the example that the Hub's card shows
    body = tree(PACKAGE / "__init__.py").body
    assert all(isinstance(n, (ast.ImportFrom, ast.Assign)) or i == 0 for i, n in enumerate(body))


def test_loaded_package_agrees(kernel):
    for name in exported():
        assert hasattr(kernel, name), name
    assert list(kernel.__all__) == exported()


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_its_files(family):
    assert (ROOT / "tests" / f"test_{family}.py").exists()
    assert (ROOT / "benchmarks" / f"benchmark_{family}.py").exists()
    names = [n.name for n in defined_functions(PACKAGE / f"{family}.py")]
    for function in public_functions(family):
        assert f"{function}_reference" in names or any(n.endswith("_reference") for n in names)
    module = ast.get_docstring(tree(PACKAGE / f"{family}.py"))
    assert module and "SECOND_ORDER" in (PACKAGE / f"{family}.py").read_text()


SECTIONS = ("Args:", "Returns:", "Raises", "Numerics", "Autograd", "Source")


@pytest.mark.parametrize("family", FAMILIES)
def test_public_docstrings(family):
    """All of the sections; or, in a line or two, a variant of what has them all: another function, or the family."""
    functions = {n.name: ast.get_docstring(n) or "" for n in defined_functions(PACKAGE / f"{family}.py")}
    whole = {name for name, text in functions.items() if all(section in text for section in SECTIONS)}
    module = ast.get_docstring(tree(PACKAGE / f"{family}.py"))
    of_all = "For each:" in module and all(section in module for section in ("Raises:", "Numerics:", "Autograd:"))
    for name in public_functions(family):
        text = functions[name]
        assert re.match(r"\S.*[.:]$", text.split("\n\n")[0].replace("\n", " ")), f"{name}: {text[:80]}"
        others = set(re.findall(r"`(\w+)", text))
        missing = [section for section in SECTIONS if section not in text]
        assert name in whole or of_all or ("Returns:" not in text and others & whole), f"{name} lacks {missing}"


def test_imports():
    """The standard library, torch, and the package itself by relative import; Triton through two files alone."""
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                modules = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                allowed = (
                    top == "torch"
                    or top in sys.stdlib_module_names
                    or (top == "triton" and path.stem in ("_triton", "_gluon"))
                )
                assert allowed, f"{path.name} imports {module}"


def test_device_questions_are_asked_in_one_place():
    asks = re.compile(r"torch\.(cuda|xpu|version)\b|get_device_properties|is_cuda\b")
    for path in SOURCES:
        if path.stem not in ("_device", "_report"):
            assert not asks.search(path.read_text()), path.name


def test_masked_loads_name_their_fill():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
                keywords = {k.arg for k in node.keywords}
                assert "mask" not in keywords or "other" in keywords, f"{path.name}:{node.lineno}"


def test_nothing_is_autotuned_and_no_asserts():
    for path in SOURCES:
        assert "autotune" not in path.read_text(), path.name
        assert not any(isinstance(n, ast.Assert) for n in ast.walk(tree(path))), path.name


def test_python_3_9_syntax():
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        unions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.AnnAssign) or isinstance(n, ast.arg)]
        for node in unions:
            annotation = getattr(node, "annotation", None)
            assert not (isinstance(annotation, ast.BinOp)), f"{path.name}:{node.lineno}: X | Y needs Python 3.10"


def test_registrations_pass_the_build_hook():
    check_registrations(ROOT)


def test_registered_names_follow_the_rule():
    for path in SOURCES:
        for node in defined_functions(path):
            if is_op(node):
                (decorator,) = [ast.unparse(d) for d in node.decorator_list if "custom_op" in ast.unparse(d)]
                assert f"add_op_namespace_prefix('{node.name}')" in decorator and "mutates_args=" in decorator
                assert node.name.endswith(("_fwd", "_bwd")), node.name


def test_layers_are_pure(kernel):
    from kernels.layer.layer import _validate_layer

    for layer in vars(kernel.layers).values():
        if isinstance(layer, type) and issubclass(layer, torch.nn.Module):
            assert layer.has_backward and layer.can_torch_compile and layer.__doc__
            _validate_layer(cls=layer, check_cls=layer, repo=None)


def test_readme_names_every_export():
    readme = (ROOT / "README.md").read_text()
    for name in exported():
        assert f"`{name}" in readme, name
    lines = [line for line in readme.splitlines() if not line.startswith("|")]
    assert len(lines) <= 112, "README.md is to be read in minutes: take out as many lines beside its tables as came in"


def test_import_touches_no_device_and_needs_no_triton(kernel):
    """In a process where Triton cannot be imported: the package loads and computes, and says why on report()."""
    folder = Path(kernel.__file__).parent
    program = f"""
import importlib.util, sys
sys.modules["triton"] = None
spec = importlib.util.spec_from_file_location("pk", {str(folder / "__init__.py")!r}, submodule_search_locations=[{str(folder)!r}])
pk = importlib.util.module_from_spec(spec); sys.modules["pk"] = pk; spec.loader.exec_module(pk)
import torch
assert not torch.cuda.is_initialized()
x = torch.randn(3, 8)
assert torch.allclose(pk.softmax(x, -1), torch.softmax(x, -1))
assert torch.allclose(pk.rms_norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
print(pk.report("cpu"))
"""  # noqa: E501
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no Triton" in done.stdout and "softmax" in done.stdout


def test_report(kernel, on_kernels):
    text = kernel.report()
    assert torch.__version__ in text and "softmax" in text
    assert text.splitlines()[1].startswith("PyTorch: ") != on_kernels
    assert all(name in text for name in exported() if name not in {*HELPERS, *NO_FAMILY, *MODULES})
