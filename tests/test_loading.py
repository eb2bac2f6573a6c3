"""Loading as on the Hub: from a hub of this file's own on this machine, then offline from the cache that left.

No network is used, and what a user reads who forgets the version or the trust is tested as well. Each script runs in
a process of its own: huggingface_hub reads its environment when it is imported.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools").is_dir():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the same with and without Triton's interpreter", allow_module_level=True)

REPO = "org/portable-kernels"


class Hub(BaseHTTPRequestHandler):
    """The Hub's answers about one repository of kernels, as huggingface_hub asks for them."""

    def do_GET(self):
        path, _, query = self.path.partition("?")
        api, files = f"/api/kernels/{REPO}", f"/kernels/{REPO}/resolve"
        branches = self.server.branches
        if path.startswith("/api/organizations/"):
            return self.answer({"name": "org", "fullname": "org", "trustedKernelPublisher": self.server.trusted})
        if path == f"{api}/refs":
            refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, (c, _) in branches.items()]
            return self.answer({"branches": refs, "tags": [], "converts": []})
        if asked := re.fullmatch(rf"{api}/revision/([^/]+)|{api}/tree/([^/]+)/?(.*)|{files}/([^/]+)/(.*)", path):
            revision = (asked[1] or asked[2] or asked[4]).replace("%2F", "/").removeprefix("refs/heads/")
            for name, (commit, folder) in branches.items():
                if revision in (name, commit):
                    if asked[1]:
                        return self.answer({"id": REPO, "sha": commit, "private": False, "tags": [], "siblings": []})
                    if asked[2]:
                        return self.answer(listing(folder, asked[3], "recursive=true" in query))
                    if (folder / asked[5]).is_file():
                        return self.answer((folder / asked[5]).read_bytes(), commit)
        self.answer({"error": "not found"}, status=404)

    do_HEAD = do_GET

    def answer(self, body, commit=None, status=200):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if commit:
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def listing(folder, below, recursive):
    entries = sorted((folder / below).glob("**/*" if recursive else "*"))
    return [
        {
            "type": "directory" if path.is_dir() else "file",
            "path": path.relative_to(folder).as_posix(),
            "oid": "0" * 40,
            "size": 0 if path.is_dir() else path.stat().st_size,
        }
        for path in entries
    ]


COMMITS = {"v1": "1" * 40, "v2": "2" * 40, "v3": "3" * 40}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Versions 1 and 2 of this package, told apart by what report() says first, and 3, for another backend alone."""
    folder = tmp_path_factory.mktemp("repository")
    built = Path(os.environ["LOCAL_KERNELS"].partition("=")[2])
    for version in COMMITS:
        shutil.copytree(built, folder / version / "build")
        (folder / version / "README.md").write_text("The card.")
    for variant in (folder / "v2" / "build").iterdir():
        said = json.loads((variant / "metadata.json").read_text())
        said["id"] += "_second"
        said["version"] = 2
        (variant / "metadata.json").write_text(json.dumps(said))
        ops = variant / "_ops.py"
        ops.write_text(ops.read_text().replace('_NAMESPACE = f"', '_NAMESPACE = f"second'))
    for variant in (folder / "v3" / "build").iterdir():
        if variant.name == "torch-cpu":
            variant.rename(variant.with_name("torch-neuron"))
        else:
            shutil.rmtree(variant)
    return folder


@pytest.fixture(scope="module")
def hub(repository):
    """(environment for a process that asks this hub, the server)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.branches = {name: (commit, repository / name) for name, commit in COMMITS.items()}
    server.branches["main"] = server.branches["v1"]
    server.trusted = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(script, *arguments, server=None, cache, **environment):
    """What the script prints; with `server` as the Hub, else offline."""
    settings = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "HF_TOKEN", "KERNELS_CACHE")}
    settings |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    settings |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    settings |= {"HF_HUB_OFFLINE": "0" if server else "1"} | environment
    if server:
        settings["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


ONLINE = """
import sys
import torch
from kernels import get_kernel, get_loaded_kernels, has_kernel

REPO, trust = "org/portable-kernels", ["org/portable-kernels"]


def refused(message, **options):
    try:
        get_kernel(REPO, **options)
    except Exception as error:
        assert message in str(error), f"{message!r} is not in {error!r}"
    else:
        raise AssertionError(f"{options} were taken")


refused("A kernel version or revision must be specified")
refused("A kernel version or revision must be specified", trust_remote_code=trust)
refused("Only one of `revision` or `version` must be specified", version=1, revision="main")
refused(
    "Kernel repository 'org/portable-kernels' is not from a trusted publisher. Set trust_remote_code=True or add the "
    "repository ID to the trust_remote_code allowlist",
    version=1,
)
refused("is not from a trusted publisher", version=1, trust_remote_code=["org/another"])
refused("Version 9 not found, available versions: 1, 2, 3", version=9, trust_remote_code=trust)
refused("Cannot find a build variant for this system", version=3, trust_remote_code=trust)

assert has_kernel(REPO, version=1, trust_remote_code=trust)
assert not has_kernel(REPO, version=3, trust_remote_code=trust)
first, second = (get_kernel(REPO, version=v, trust_remote_code=trust) for v in (1, 2))
assert first is get_kernel(REPO, version=1, trust_remote_code=trust)
assert first.__name__ + "_second" == second.__name__
assert first._ops.ops.name != second._ops.ops.name
x = torch.randn(4, 33)
for kernel in (first, second):
    for f in (kernel.rms_norm, torch.compile(kernel.rms_norm, backend="eager", fullgraph=True)):
        torch.testing.assert_close(f(x), torch.nn.functional.rms_norm(x, (33,), eps=1e-6))
commits = sorted(loaded.repo_info.revision for loaded in get_loaded_kernels())
assert commits == ["1" * 40, "2" * 40], commits
print(first.__file__)
"""


@pytest.fixture(scope="module")
def downloaded(hub, tmp_path_factory):
    """(cache, what was printed) after version 1 and 2 came from the hub."""
    cache = tmp_path_factory.mktemp("downloaded")
    return cache, run(ONLINE, server=hub, cache=cache)


def test_from_a_hub(downloaded):
    cache, printed = downloaded
    assert str(cache / "hub" / "kernels--org--portable-kernels" / "snapshots" / COMMITS["v1"]) in printed
    assert "You are using version 1 of 'org/portable-kernels', but version 3 is available" in printed


def test_a_trusted_publisher_needs_no_trust(hub, downloaded, monkeypatch):
    monkeypatch.setattr(hub, "trusted", True)
    run(
        "from kernels import get_kernel; get_kernel('org/portable-kernels', version=1)", server=hub, cache=downloaded[0]
    )


def test_trust_cannot_be_asked_for(hub, tmp_path):
    """No network and no offline mode."""
    script = """
from kernels import get_kernel
try:
    get_kernel("org/portable-kernels", version=1)
except ValueError as error:
    print(error)
"""
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    assert "could not verify publisher trust status" in run(script, cache=tmp_path, **unreachable)


WHOLE = """
from huggingface_hub import snapshot_download
snapshot_download("org/portable-kernels", repo_type="kernel", revision="v1")
"""
AFTERWARDS = """
import torch
from kernels import get_kernel

for which in ({"version": 1}, {"revision": "1" * 40}):
    try:
        kernel = get_kernel("org/portable-kernels", **which)
        torch.testing.assert_close(kernel.softmax(torch.ones(2, 4), -1), torch.full((2, 4), 0.25))
        print("loaded")
    except Exception as error:
        print(error)
"""


def test_offline_after_a_download(hub, downloaded):
    """What get_kernel left is not enough; the whole branch is, downloaded by its name.

    get_kernel downloads one variant of a commit: the cache knows what else the commit has, and no branch.
    """
    printed = run(AFTERWARDS, cache=downloaded[0])
    assert "Version 1 of 'org/portable-kernels' is not available in the local cache" in printed
    assert "Cannot find a local snapshot for org/portable-kernels (revision: 1111" in printed
    assert WHOLE.splitlines()[-1] in (ROOT / "docs" / "integration.md").read_text()
    run(WHOLE, server=hub, cache=downloaded[0])
    assert run(AFTERWARDS, cache=downloaded[0]).count("loaded") == 2


OFFLINE = """
import sys
from pathlib import Path
import torch
from kernels import LayerRepository, LockedLayerRepository, Mode, get_kernel, get_locked_kernel, has_kernel, kernelize
from kernels import load_kernel, replace_kernel_forward_from_hub, use_kernel_mapping

REPO, lockfile = "org/portable-kernels", Path(sys.argv[1])
assert has_kernel(REPO, version=1) and not has_kernel(REPO, version=3)
kernels = [get_kernel(REPO, version=1), get_kernel(REPO, version=2)]
kernels += [get_locked_kernel(REPO, lockfile=lockfile), load_kernel(REPO, lockfile=lockfile)]
assert kernels[1] is kernels[2] is kernels[3] is not kernels[0]
x = torch.randn(4, 33)
expected = torch.nn.functional.rms_norm(x, (33,), eps=1e-6)
for kernel in kernels:
    torch.testing.assert_close(kernel.rms_norm(x), expected)

module = torch.nn.RMSNorm(33, eps=1e-6)
replace_kernel_forward_from_hub(torch.nn.RMSNorm, "RMSNorm")
for repository, kernel in (
    (LayerRepository(REPO, layer_name="RMSNorm", version=1), kernels[0]),
    (LockedLayerRepository(REPO, layer_name="RMSNorm", lockfile=lockfile), kernels[1]),
):
    with use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
        kernelize(module, mode=Mode.TRAINING, device="cpu", use_fallback=False)
    assert module.forward.__module__ == kernel.__name__ + ".layers"
    torch.testing.assert_close(module(x), expected)
try:
    get_locked_kernel("org/another", lockfile=lockfile)
except ValueError as error:
    print(error)
try:
    get_kernel(REPO, version=4)
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def cache(repository, tmp_path_factory):
    """A cache made by hand, as a machine without a network is given one."""
    home = tmp_path_factory.mktemp("cache")
    stored = home / "hub" / "kernels--org--portable-kernels"
    (stored / "refs").mkdir(parents=True)
    for name, commit in COMMITS.items():
        (stored / "refs" / name).write_text(commit)
        shutil.copytree(repository / name, stored / "snapshots" / commit)
    return home


def test_offline_from_a_cache_made_by_hand(cache, tmp_path):
    lock = [{"dependency": {"repo-id": REPO, "version": 2}, "lock": {"commit": COMMITS["v2"]}}]
    (tmp_path / "kernels.lock").write_text(json.dumps(lock))
    printed = run(OFFLINE, tmp_path / "kernels.lock", cache=cache)
    assert "Kernel `org/another` is not locked. Please lock it with `kernels lock <project>`" in printed
    assert "Version 4 not found, available versions: 1, 2, 3" in printed


FOLDERS = """
import os
import sys
from pathlib import Path
import torch
from kernels import get_kernel, get_local_kernel, has_kernel

folder = Path(sys.argv[1])
loaded = []
for path in (folder, folder / "build", folder / "build" / sys.argv[2]):
    loaded.append(get_local_kernel(path))
    os.environ["LOCAL_KERNELS"] = f"org/portable-kernels={path}:org/another={path}"
    assert has_kernel("org/portable-kernels", version=7)  # nobody looks at the number
    loaded.append(get_kernel("org/portable-kernels", version=7))
    loaded.append(get_kernel("org/another", revision="main"))
assert all(kernel is loaded[0] for kernel in loaded)
assert get_local_kernel(folder, backend="cpu").__file__.endswith("torch-cpu/__init__.py")
try:
    get_local_kernel(folder.parent / "v3")
except FileNotFoundError as error:
    print(error)
os.environ["LOCAL_KERNELS"] = "org/portable-kernels"
try:
    get_kernel("org/portable-kernels", version=1)
except ValueError as error:
    print(error)
"""


def test_from_a_folder(repository, kernel, tmp_path):
    printed = run(FOLDERS, repository / "v1", Path(kernel.__file__).parent.name, cache=tmp_path)
    assert "Cannot find a build variant for this system in" in printed and "torch-neuron" in printed
    assert "Invalid LOCAL_KERNELS entry: org/portable-kernels. Expected format" in printed


# the command `kernels`

CLI = "import sys; from kernels.cli import main; sys.argv = ['kernels', *sys.argv[1:]]; main()"
TINY_BENCHMARK = """
import torch
from kernels.benchmark import Benchmark


class Tiny(Benchmark):
    seed = 0

    def setup(self):
        self.x = torch.randn(4, 64, device=self.device)
        self.out = torch.empty_like(self.x)

    def benchmark_softmax(self):
        self.out = self.kernel.softmax(self.x, -1)

    def verify_softmax(self):
        return torch.softmax(self.x, -1)
"""


def test_info_of_a_folder(repository, tmp_path):
    pytest.importorskip("sigstore")
    said = json.loads(run(CLI, "info", repository / "v1", "--json", cache=tmp_path))
    assert (said["name"], said["version"], said["license"]) == ("portable-kernels", 1, "Apache-2.0")
    assert said["python_depends"] == [] and len(said["backends"]) == 4


def test_lock_and_download(hub, cache, tmp_path, monkeypatch):
    """A project that asks for a version, and has its commit from then on."""
    pytest.importorskip("sigstore")
    monkeypatch.setattr(hub, "trusted", True)  # `kernels lock` takes no trust_remote_code
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"org/portable-kernels" = 2\n')
    run(CLI, "lock", project, server=hub, cache=tmp_path)
    assert COMMITS["v2"] in (project / "kernels.lock").read_text()
    run(CLI, "download", project, server=hub, cache=tmp_path)
    script = """
import sys
from pathlib import Path
from kernels import get_locked_kernel
print(get_locked_kernel("org/portable-kernels", lockfile=Path(sys.argv[1])).__name__)
"""
    assert "_second" in run(script, project / "kernels.lock", server=hub, cache=tmp_path)
    said = run(CLI, "versions", REPO, server=hub, cache=tmp_path)
    assert re.search(r"Version 1:(?s:.*)Version 2:(?s:.*)Version 3:", said)


def test_benchmark(repository, tmp_path):
    pytest.importorskip("sigstore")
    pytest.importorskip("tabulate")
    shutil.copytree(repository / "v1" / "build", tmp_path / "build")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "benchmark_tiny.py").write_text(TINY_BENCHMARK)
    options = ["--iterations", "3", "--warmup", "1", "--output", tmp_path / "out.json"]
    printed = run(CLI, "benchmark", tmp_path, *options, cache=tmp_path)
    assert "softmax" in printed
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["verified"] and result["timingResults"]["iterations"] == 3
