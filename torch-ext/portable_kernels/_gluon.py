"""Gluon, the lower level of Triton, on which a kernel says what each of its warps does: for Hopper GPUs alone.

Imported by the kernels that are written in it. It is young: `GLUON` says whether it is one that they were tested with,
and nothing calls them where it is not.
"""

from ._triton import DESCRIPTORS, GLUON, _Absent

if GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    DESCRIPTORS.add(TensorDescriptor)
else:
    gluon = gl = fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = _Absent()
