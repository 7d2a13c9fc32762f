"""Compiles quack's GEMM with groups along k: weight gradients for MoE experts.

The library takes group starts, with a leading zero; torch, and so this project, has group ends. The
kernels read a start as the previous group's end, so launches convert nothing.

A is contiguous along m and B along n, so a group may begin at any k. Tiles reach past a group's
last k: the library describes both operands to TMA so that those terms are zeros. A group without k
has result tiles but no k tiles; the library then fills its accumulators with zeros before it stores
them (``acc.fill(0.0)`` in gemm_sm90.py, ``clear_acc`` in gemm_sm100.py).

Whatever the ends are, no kernel should read outside its operands: an end is clamped to A's k, and a
group that would end before it begins has no k tiles. Writes do not depend on ends, as an H200 has
confirmed; for reads, it rests on this reasoning. The result for such ends is undefined.
"""

from __future__ import annotations

import functools
from typing import Any

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, STREAM, WORKSPACE
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype
from nvgemm_runtime.gemm.types import DType

from .designs import Design
from .designs import designs as plain_designs
from .entry import (
    ALIGNMENT_BYTES,
    calling_convention,
    compile_launch,
    cute_type,
    import_library,
    kernel_options,
    scheduler_options,
)
from .families import SM90, MmaFamily, family_of
from .group_begins import begins_of_groups

_HOPPER_DYNAMIC = tuple(
    Design(tile=tile, cluster=cluster, pingpong=pingpong, dynamic=True)
    for pingpong, tile, clusters in (
        (True, (128, 128), ((1, 2),)),
        (True, (128, 160), ((2, 1),)),
        (True, (128, 192), ((1, 1), (2, 1))),
        (True, (192, 128), ((1, 2), (2, 1))),
        (False, (128, 256), ((1, 2), (2, 1))),
        (False, (256, 128), ((1, 1),)),
        (False, (256, 160), ((1, 1),)),
        (False, (256, 192), ((1, 1),)),
    )
    for cluster in clusters
)
"""Dynamic designs. Groups differ in length, so tiles differ in time: a static assignment would give
some thread blocks more work than others. Chosen among 45 designs that an H100 timed, for gradients
in four models' experts, with rows spread evenly or with skew."""

_DYNAMIC = {SM90: _HOPPER_DYNAMIC}


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """Returns the designs for an architecture, in a fixed order.

    The library neither swaps operands nor splits k for such groups. The tile's k is the library's
    own choice.
    """
    static = (
        one
        for one in plain_designs(arch, signature)
        if not one.swapped and not one.has_workspace and one.tile_k_blocks == 1
    )
    return (*static, *_DYNAMIC.get(family_of(arch), ()))


def compile_k_grouped(design: Design, signature: Signature, arch: str) -> Any:
    """Compiles one design for groups along k; arguments are as in `entry.compile_entry`.

    The function takes ``(a, b, offsets, out, stream)``, on Hopper ``clusters`` before the stream,
    and ``workspace`` before that with a dynamic schedule.
    """
    import_library()
    import cutlass
    from cutlass import cute
    from quack.varlen_utils import VarlenArguments

    kind = _library_kernel(family_of(arch))
    gemm = kind(
        cutlass.Float32,
        cute_type(signature.a),
        design.tile,
        (*design.cluster, 1),
        **kernel_options(design, arch),
    )
    parameters = calling_convention(design, signature, arch).parameters

    def launch(**given: Any) -> None:
        starts = begins_of_groups()(given[Role.OFFSETS.value], cute.size(given["a"], mode=[1]))
        b = given["b"]  # the library expects B as (n, k)
        transposed = cute.make_tensor(b.iterator, cute.select(b.layout, [1, 0]))
        gemm(
            given["a"], transposed, given["out"], None, gemm.EpilogueArguments(),
            scheduler_options(given.get(CLUSTERS), given.get(WORKSPACE)),
            VarlenArguments(mCuSeqlensK=starts), given[STREAM], None, None,
        )  # fmt: skip

    return compile_launch(launch, _NAMES, _sample_tensors(signature), parameters, arch)


_NAMES = {
    "a b offsets out stream": "multiply_k_groups",
    "a b offsets out clusters stream": "multiply_k_groups_with_clusters",
    "a b offsets out workspace clusters stream": "multiply_k_groups_dynamic",
}
"""Names of entry functions by their parameters, as in `entry`."""


@functools.cache
def _library_kernel(family: MmaFamily) -> Any:
    """Returns the library's GEMM with a scheduler for any group ends."""
    import cutlass
    from cutlass import Int32, cute
    from quack.tile_scheduler import TileScheduler

    class Scheduler(TileScheduler):  # type: ignore[misc]
        """Assigns no k tiles to a group that ends before it begins; the library counts below 0.

        Every warp queries it, so loads, accumulators and pingpong bookkeeping agree. Every warp
        also waits for the previous kernel on the stream before it takes its first tile. In the
        library, only loading warps wait, and the others follow their loads. Groups without k load
        nothing, so their zeros could overwrite memory that the previous kernel still reads, if it
        is freed after that kernel.
        """

        def initial_work_tile_info(self, **options: Any) -> Any:
            cute.arch.griddepcontrol_wait()
            return super().initial_work_tile_info(**options)

        def get_split_k_tile_range(self, k_tile_total: Any, split_idx: Any, **options: Any) -> Any:
            tiles = cutlass.max(k_tile_total, Int32(0))
            return super().get_split_k_tile_range(tiles, split_idx, **options)

    def get_scheduler_class(self: Any, varlen_m: bool = False) -> Any:
        assert not varlen_m
        return Scheduler

    base = family.gemm_with_default_epilogue()
    return type(f"GemmKGrouped{family.name}", (base,), {"get_scheduler_class": get_scheduler_class})


def _sample_tensors(signature: Signature) -> tuple[Any, ...]:
    """Builds sample tensors for a, b, offsets and out, with dynamic extents."""
    from cutlass import Int32, cute

    m, n, k, groups = (cute.sym_int() for _ in range(4))

    def stride(dtype: DType) -> Any:
        return cute.sym_int64(divisibility=8 * ALIGNMENT_BYTES // dtype.bits)

    def tensor(role: Role, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
        return cute.runtime.make_fake_tensor(
            cute_type(role_dtype(signature, role)), shape, strides, assumed_align=ALIGNMENT_BYTES
        )

    a, b, out = signature.a, signature.b, signature.out
    return (
        tensor(Role.A, (m, k), (1, stride(a))),
        tensor(Role.B, (k, n), (stride(b), 1)),
        cute.runtime.make_fake_tensor(Int32, (groups,), (1,), assumed_align=4),
        tensor(Role.OUT, (groups, m, n), (stride(out), stride(out), 1)),
    )
