"""Tensors and models that lie on two processes: values, and that what is sharded on its rows stays so.

On two GPUs over NCCL, on the CPU over gloo. PROOF=1 does to every op what is else done to three.
"""

import copy
import sys

import pytest
import torch
from _calls import NAMES, NO_GRADIENT, RANDOM
from _numerics import assert_close
from _processes import in_two
from test_every_op import PROOF, Call, close, into

SHARDED = ["softmax", "rms_norm", "swiglu"]  # by their ops; PROOF=1: all, some of them by their formulas


@pytest.fixture
def apart(device):
    """Processes that have each their own device."""
    if device.type != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or none")


def run_tensors(kernel, device, by_ops):
    """Operands of the first one's shape are sharded on a dimension, others are on every rank."""
    assert "torch.distributed.tensor" not in sys.modules
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device.type, (2,))
    for name in [n for n in NAMES if n not in RANDOM | NO_GRADIENT] if PROOF else SHARDED:
        call, there = Call(kernel, name, device), Call(kernel, name, device)
        shape = call.given[call.names[0]].shape
        expected = (*call.of(*(tensors := call.inputs())), *call.gradients(tensors))
        place = lambda t, dim: distribute_tensor(t.detach(), mesh, [Shard(dim) if t.shape == shape else Replicate()])  # noqa: B023, E731
        there.given = {k: place(v, 0) if isinstance(v, torch.Tensor) else v for k, v in call.given.items()}
        for dim in (0, len(shape) - 1):
            leaves = [place(t, dim).requires_grad_() for t in tensors]
            given = [distribute_tensor(g, mesh, [Replicate()]) for g in into(call.of(*tensors))]
            ways = [there.of] + [torch.compile(there.of, backend="aot_eager")] * (by_ops and name == "rms_norm")
            for way in ways:
                try:
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                        results = way(*leaves)
                        found = (*results, *torch.autograd.grad([r for r in results if r.requires_grad], leaves, given))
                except (NotImplementedError, RuntimeError) as error:  # refused with words
                    assert name not in SHARDED or dim and not by_ops, f"{name}: {error}"
                    assert not by_ops or "DTensor" in str(error), f"{name}: {error}"
                    continue
                for a, b in zip(found, expected, strict=True):
                    atol = 1e-5 * float(b.detach().abs().max())  # sums of other orders, some of them of what cancels
                    torch.testing.assert_close(a.full_tensor(), b, rtol=1e-5, atol=atol)
                rows = not dim or name == "swiglu"  # whose numbers are all on their own
                assert not rows or results[0].placements == (Shard(dim),), f"{name}: not sharded any more"
                if by_ops and name in SHARDED and rows:
                    ran = {event.key.split("::")[-1].split("_")[-1] for event in seen.key_averages()}
                    assert {"fwd", "bwd"} <= ran, f"{name}: by its formula"
    x, w = torch.randn(2, 4, 16, device=device), torch.randn(16, device=device)
    if by_ops:  # rows of two dimensions, on a mesh of two; the sum of what each process has is left to the caller
        mesh = init_device_mesh(device.type, (1, 2))
        leaves = [distribute_tensor(t, mesh, p) for t, p in ((x, [Shard(0), Shard(1)]), (w, [Replicate()] * 2))]
        y = kernel.rms_norm(*(t.requires_grad_() for t in leaves))
        dx, dw = torch.autograd.grad(y, leaves, leaves[0].detach())
        assert y.placements == dx.placements == leaves[0].placements and dw.placements == (Partial(), Partial())
        whole = leaves[0].full_tensor(), leaves[1].full_tensor()  # of what the first process drew
        close([y.full_tensor()], [kernel.rms_norm(*whole)])


def test_tensors(apart, on_kernels, tmp_path):
    """DTensors sharded on their rows go through the kernels, and stay sharded; on others they are right, or refused."""
    in_two(run_tensors, tmp_path, on_kernels)


def run_model(kernel, device):
    """Each process has a sequence, and a part of each weight: the mean of two losses, and of their gradients."""
    import torch.distributed as dist
    from test_patching import model_of, step
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    untouched = model_of("LlamaForCausalLM").to(device).train()
    ids = torch.randint(3, 48, (2, 6)).to(device)
    inputs = {"input_ids": ids, "labels": ids}
    exact, theirs = step(copy.deepcopy(untouched).double(), inputs), step(copy.deepcopy(untouched), inputs)
    whole, parts = copy.deepcopy(untouched), copy.deepcopy(untouched)
    for model in (whole, parts):
        assert kernel.patching.patch_model(model).replaced
    for layer in parts.model.layers:
        fully_shard(layer, mesh=dist.init_device_mesh(device.type, (2,)))
    fully_shard(parts, mesh=dist.init_device_mesh(device.type, (2,)))
    mine = {k: v[dist.get_rank() :][:1] for k, v in inputs.items()}

    learning = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, parts)]
    for n in range(3):
        loss, _, gradients = step(whole, inputs)
        its_loss, _, its_gradients = step(parts, mine)
        dist.all_reduce(its_loss, dist.ReduceOp.SUM)
        torch.testing.assert_close(its_loss / 2, loss, rtol=1e-5, atol=0)
        assert its_gradients.keys() == gradients.keys()
        for k, g in its_gradients.items():
            assert g.to_local().numel() < g.numel(), f"{k}: not sharded"
            if n:  # the weights are not quite the same any more
                torch.testing.assert_close(g.full_tensor(), gradients[k], rtol=1e-4, atol=1e-5)
                continue
            for found in (g.full_tensor(), gradients[k]):
                slack = (theirs[2][k].double() - exact[2][k]).abs().max().item()
                assert_close(found, exact[2][k], dim=None, slack=slack, name=k)
        for optimizer in learning:
            optimizer.step()


def test_fully_sharded_model(apart, on_kernels, tmp_path):
    """A patched Llama under FSDP2 learns as it does whole."""
    pytest.importorskip("transformers")
    if not on_kernels:
        pytest.skip("test_patching.py does this in one process, by the formulas")
    in_two(run_model, tmp_path)
