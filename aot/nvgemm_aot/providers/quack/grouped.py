"""Compiles quack's grouped GEMM: each group's rows multiply their own matrix, as for MoE experts.

The library takes group starts, with a leading zero; torch, and so this project, has group ends. The
kernels read a start as the previous group's end, so launches convert nothing.

Whatever the ends are, no kernel should read or write outside its operands: an end is clamped to A's
rows, and a group that would end before it begins has no tiles. An H200 has confirmed this for
writes; for reads, it rests on this reasoning. The result for such ends is undefined.

A bias is a matrix with a row for each group. A tile selects its row by the scheduler's group
number, as it selects its B, so no end affects it. For an added matrix, a tile reads the rows at its
own position, and past a group's end those of the next group, as it does in A.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, STREAM
from nvgemm_runtime.gemm.epilogues import Addend
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, roles
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
from .epilogue import epilogue_arguments, has_own_epilogue, kernel_with_epilogue
from .families import SM90, family_of
from .gathered_groups import can_gather, gathering, gathers, options_of
from .group_begins import begins_of_groups

_HOPPER_UNCLUSTERED = (
    *(((m, n), False) for m, n in product((128, 256), (128, 160, 192)) if m * n > 128 * 128),
    ((128, 224), False),
    ((64, 192), False),
    *(((128, n), True) for n in (128, 160, 208)),
    ((192, 128), True),
    ((64, 192), True),
)
"""Added to plain designs: a cluster's rows belong to one group, so a second thread block along m
idles in groups with few rows."""

_MORE = {SM90: _HOPPER_UNCLUSTERED}


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """Returns the designs for an architecture, in a fixed order.

    A swapped design would have groups along its n. Group tiles cannot be counted for a workspace,
    and the library does not split k for groups. So dynamic schedules and splits are not offered.
    """
    plain = (
        one
        for one in plain_designs(arch, signature)
        if not one.swapped and not one.has_workspace and one.tile_k_blocks == 1
    )
    more = (
        Design(tile=tile, cluster=(1, 1), pingpong=pingpong)
        for tile, pingpong in _MORE.get(family_of(arch), ())
    )
    found = dict.fromkeys((*plain, *more))
    return tuple(one for one in found if not gathers(signature) or can_gather(one, signature, arch))


def compile_grouped(design: Design, signature: Signature, arch: str) -> Any:
    """Compiles one design for a grouped signature; arguments are as in `entry.compile_entry`.

    The function takes ``(a, b, offsets, out, stream)``, with scales ``scale_a`` and ``scale_b``
    after ``b``, gathered rows' ``rows`` after ``offsets``, and an ``addend`` before ``out``. On
    Hopper, ``clusters`` comes before the stream.
    """
    import_library()

    family = family_of(arch)
    kind = family.gemm_with_default_epilogue()
    if has_own_epilogue(signature):
        kind = kernel_with_epilogue(kind, None)
    gemm = gemm_of_groups(kind, f"GemmGrouped{family.name}", design, signature, arch)

    def launch(**given: Any) -> None:
        epilogue: dict[str, Any] = {}
        matrix = None
        if has_own_epilogue(signature):
            tensors = {role: given[role.value] for role in roles(signature)}
            epilogue, matrix = epilogue_arguments(signature, tensors, swapped=False)
        gemm(
            given["a"], given["b"], given["out"], matrix, gemm.EpilogueArguments(**epilogue),
            scheduler_options(given.get(CLUSTERS)),
            arguments_of_groups(given), given[STREAM], None, None,
        )  # fmt: skip

    return compile_for_groups(launch, design, signature, arch)


def gemm_of_groups(kind: type, name: str, design: Design, signature: Signature, arch: str) -> Any:
    """Builds a kernel from a library class, for any group ends and B as (groups, k, n)."""
    import cutlass

    if gathers(signature):
        kind, name = gathering(kind, family_of(arch)), f"{name}_gathering"
    gemm = scheduled_by_groups(kind, name)(
        cutlass.Float32,
        cute_type(signature.a),
        design.tile,
        (*design.cluster, 1),
        **kernel_options(design, arch),
        **options_of(signature, arch),
    )
    gemm.b_transposed = True  # the library expects B as (groups, n, k)
    return gemm


def compile_for_groups(
    launch: Callable[..., None], design: Design, signature: Signature, arch: str
) -> Any:
    """Compiles a function that passes a grouped signature's tensors to ``launch`` by name."""
    parameters = calling_convention(design, signature, arch).parameters
    return compile_launch(launch, _NAMES, _sample_tensors(signature), parameters, arch)


_NAMES = {
    "a b offsets out stream": "multiply_groups",
    "a b offsets out clusters stream": "multiply_groups_with_clusters",
    "a b offsets addend out stream": "add_to_groups",
    "a b offsets addend out clusters stream": "add_to_groups_with_clusters",
    "a b offsets addend sums out stream": "sum_groups",
    "a b offsets addend sums out clusters stream": "sum_groups_with_clusters",
    "a b scale_a scale_b offsets out stream": "scale_groups",
    "a b scale_a scale_b offsets out clusters stream": "scale_groups_with_clusters",
    "a b offsets rows out stream": "gather_groups",
    "a b offsets rows out clusters stream": "gather_groups_with_clusters",
    "a b offsets rows addend out stream": "gather_and_add",
    "a b offsets rows addend out clusters stream": "gather_and_add_with_clusters",
}
"""Names of entry functions by their parameters, as in `entry`."""


def arguments_of_groups(given: Mapping[str, Any]) -> Any:
    """Returns the library's group arguments, from a launch's tensors by name."""
    from cutlass import cute
    from quack.varlen_utils import VarlenArguments

    rows = given.get(Role.ROWS.value)
    divided = given["a"] if rows is None else rows
    starts = begins_of_groups()(given[Role.OFFSETS.value], cute.size(divided, mode=[0]))
    return VarlenArguments(mCuSeqlensM=starts, mAIdx=rows)


def scheduled_by_groups(kernel: type, name: str) -> Any:
    """Returns a subclass of a library kernel whose scheduler accepts any group ends."""
    scheduler = _library_scheduler()

    def get_scheduler_class(self: Any, varlen_m: bool = False) -> Any:
        assert varlen_m
        return scheduler

    return type(name, (kernel,), {"get_scheduler_class": get_scheduler_class})


@functools.cache
def _library_scheduler() -> Any:
    """Returns the library's scheduler, extended to any group ends."""
    import cutlass
    from cutlass import Int32, cute
    from quack.tile_scheduler import VarlenMTileScheduler

    class Scheduler(VarlenMTileScheduler):  # type: ignore[misc]
        """Counts no tiles in a group that ends before it begins; the library counts below 0."""

        @cute.jit  # type: ignore[untyped-decorator]
        def _get_num_m_blocks(
            self, lane: Int32, bidb_start: Int32, block_size: cutlass.Constexpr[int]
        ) -> Int32:
            groups = self.params.problem_shape_ncluster_mnl[2]
            group = lane + bidb_start
            begin = Int32(0)
            if group <= groups:
                begin = self.params.cu_seqlens_m[group]
            rows = cutlass.max(cute.arch.shuffle_sync_down(begin, offset=1) - begin, Int32(0))
            return (
                cute.ceil_div(rows, block_size)
                if group < groups and lane < cute.arch.WARP_SIZE - 1
                else Int32(0)
            )

    return Scheduler


def _sample_tensors(signature: Signature) -> tuple[Any, ...]:
    """Builds sample tensors for all roles, with dynamic extents."""
    from cutlass import Int32, cute

    m, n, k, groups, tokens = (cute.sym_int() for _ in range(5))
    out_n = cute.sym_int() if signature.is_gated else n
    layout = signature.layout

    def stride(dtype: DType) -> Any:
        return cute.sym_int64(divisibility=8 * ALIGNMENT_BYTES // dtype.bits)

    def tensor(role: Role, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
        return cute.runtime.make_fake_tensor(
            cute_type(role_dtype(signature, role)), shape, strides, assumed_align=ALIGNMENT_BYTES
        )

    a, b, out = signature.a, signature.b, signature.out
    kind = None if signature.epilogue is None else signature.epilogue.addend
    of_rows = {Addend.MATRIX: n, Addend.GATES: n, Addend.PRODUCT: out_n}
    added = (m, of_rows[kind]) if kind in of_rows else (groups, n)
    inner = (stride(b), 1) if layout.b_row_major else (1, stride(b))
    samples = {
        Role.A: lambda: tensor(Role.A, (tokens if gathers(signature) else m, k), (stride(a), 1)),
        Role.B: lambda: tensor(Role.B, (groups, k, n), (stride(b), *inner)),
        Role.SCALE_A: lambda: tensor(Role.SCALE_A, (m,), (1,)),
        Role.SCALE_B: lambda: tensor(
            Role.SCALE_B, (groups, n), (stride(role_dtype(signature, Role.SCALE_B)), 1)
        ),
        Role.OFFSETS: lambda: cute.runtime.make_fake_tensor(
            Int32, (groups,), (1,), assumed_align=4
        ),
        Role.ROWS: lambda: cute.runtime.make_fake_tensor(Int32, (m,), (1,), assumed_align=4),
        Role.ADDEND: lambda: tensor(Role.ADDEND, added, (stride(out), 1)),
        Role.SUMS: lambda: cute.runtime.make_fake_tensor(
            cute_type(DType.FP32), (m, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4
        ),
        Role.OUT: lambda: tensor(Role.OUT, (m, out_n), (stride(out), 1)),
    }
    return tuple(samples[role]() for role in roles(signature))
