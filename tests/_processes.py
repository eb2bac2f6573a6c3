"""Two processes of one group: each on a GPU of its own over NCCL where there are two, else over gloo."""

import os

import _interpreter
import pytest
import torch


def in_two(function, tmp_path, *given):
    """Run function(kernel, device, *given), of a test's file, in both."""
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    torch.multiprocessing.spawn(_run, args=(function, str(tmp_path / "rendezvous"), given), nprocs=2)


def _run(rank, function, rendezvous, given):
    import torch.distributed as dist
    from kernels import get_kernel

    torch.set_num_threads(1)
    _interpreter.quicken()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    repo_id, version = os.environ["PORTABLE_KERNELS_TESTED"].split("@")
    kernel = get_kernel(repo_id, version=int(version))
    dist.init_process_group("nccl" if gpus > 1 else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    function(kernel, device, *given)
    dist.destroy_process_group()
