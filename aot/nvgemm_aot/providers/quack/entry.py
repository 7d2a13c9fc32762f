"""Compiles quack's dense GEMM behind the calling convention of this project.

quack's function takes eleven arguments, among them tuples for epilogue and scheduler. A small
function around it takes A, B, the result and the stream, a workspace if k is split, and on Hopper
the number of clusters that the device runs at once. It passes constants for the rest, and adds
nothing to the device code.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

from nvgemm_runtime.bundle.workspace import ZEROED_MULTIPLE_BYTES
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType

from .designs import FLAG_BYTES, HOPPER, Design

ALIGNMENT_BYTES = 16
"""What TMA demands of addresses, and of strides other than 1."""

CUTE_TYPES = {
    DType.FP32: "Float32",
    DType.FP16: "Float16",
    DType.BF16: "BFloat16",
}
"""By element type: its class in ``cutlass``, for the types that are offered."""

_MAX_SWIZZLE = 8
"""Most tiles along one dimension before the scheduler turns; quack's own default."""


@functools.cache
def import_library() -> None:
    """Import the GEMMs of quack (about 10 s with the compiler).

    The package's own ``__init__`` imports norms, losses and an autotuner that needs Triton, which
    comes only with torch for CUDA. It is left out, but for the extensions of the DSL that it
    installs.

    Raises:
        ToolchainError: If a part of it is missing.
    """
    try:
        spec = importlib.util.find_spec("quack")
        if spec is None:
            raise ImportError("no package quack")
        if "quack" not in sys.modules:
            sys.modules["quack"] = importlib.util.module_from_spec(spec)
        import quack.dsl
        import quack.gemm_default_epi  # noqa: F401
    except ImportError as error:
        raise ToolchainError(
            f"cannot compile quack's kernels: {error}; run: pip install 'nvgemm-aot[build]'"
        ) from error


def compile_entry(design: Design, signature: Signature, arch: str) -> Any:
    """Compile one design for a signature; may raise any exception of the compiler.

    Args:
        design: The design.
        signature: What to compute.
        arch: Architecture, e.g. ``sm_90a``.
    """
    import_library()
    from cutlass import Int32, Uint8, cute

    a, b, out = _sample_tensors(signature)
    samples = {"a": a, "b": b, "out": out}
    if design.splits > 1:
        samples["workspace"] = cute.runtime.make_fake_tensor(
            Uint8, (cute.sym_int64(),), (1,), assumed_align=ALIGNMENT_BYTES
        )
    if arch == HOPPER:
        samples["clusters"] = Int32(1)
    samples["stream"] = cute.runtime.make_fake_stream()
    call = _entry(design, _gemm_object(design, signature, arch), tuple(samples))
    return cute.compile[cute.GPUArch(arch), cute.EnableTVMFFI(True)](
        cute.jit(call), *samples.values()
    )


def _entry(design: Design, gemm: Any, parameters: tuple[str, ...]) -> Any:
    """The function that is exported. Its parameters are named, for its launcher shows the names."""
    from cuda.bindings.driver import CUstream
    from cutlass import Int32, cute
    from quack.tile_scheduler import TileSchedulerOptions

    def launch(a: Any, b: Any, out: Any, stream: Any, clusters: Any, workspace: Any) -> None:
        first, second = (b, a) if design.swapped else (a, b)
        split = {} if workspace is None else _split_tensors(design, out, workspace)
        scheduler = TileSchedulerOptions(
            max_active_clusters=Int32(1) if clusters is None else clusters,
            max_swizzle_size=Int32(_MAX_SWIZZLE),
        )
        epilogue = gemm.EpilogueArguments(**split)
        gemm(first, second, out, None, epilogue, scheduler, None, stream, None, None)

    def plain(a: Any, b: Any, out: Any, stream: Any) -> None:
        launch(a, b, out, stream, None, None)

    def persistent(a: Any, b: Any, out: Any, clusters: Any, stream: Any) -> None:
        launch(a, b, out, stream, clusters, None)

    def splitting(a: Any, b: Any, out: Any, workspace: Any, clusters: Any, stream: Any) -> None:
        launch(a, b, out, stream, clusters, workspace)

    entries = {one.__code__.co_varnames[: one.__code__.co_argcount]: one
               for one in (plain, persistent, splitting)}  # fmt: skip
    entry = entries[parameters]
    kinds = {"clusters": Int32, "stream": CUstream}
    entry.__annotations__ = {name: kinds.get(name, cute.Tensor) for name in parameters}
    return entry


def _split_tensors(design: Design, out: Any, workspace: Any) -> dict[str, Any]:
    """The counters and partial results of all tiles, in a workspace as `workspace_of` has it.

    Both have a place for every thread block of a cluster, also one that lies outside the result.
    """
    from cutlass import Float32, Int32, Int64, cute

    (m, n), (batch, rows, columns) = design.tile, (1, *out.shape)[-3:]
    extents = (columns, rows) if design.swapped else (rows, columns)
    tiles_m, tiles_n = (
        cute.round_up(cute.ceil_div(extent, tile), multiple)
        for extent, tile, multiple in zip(extents, (m, n), design.cluster)
    )
    # 64 bits: a result may have more elements than 32 bits count.
    row = Int64(tiles_n)
    matrix = row * tiles_m
    flags = cute.make_tensor(
        cute.recast_ptr(workspace.iterator, dtype=Int32),
        cute.make_layout((tiles_m, tiles_n, batch), stride=(row, 1, matrix)),
    )
    begin = cute.round_up(matrix * batch * FLAG_BYTES, ZEROED_MULTIPLE_BYTES)
    partials = cute.make_ptr(
        Float32,
        (workspace.iterator + cute.assume(begin, divby=ZEROED_MULTIPLE_BYTES)).toint(),
        cute.AddressSpace.gmem,
        assumed_align=ALIGNMENT_BYTES,
    )
    size = m * n

    def elements(tiles: Any) -> Any:
        return cute.assume(tiles * size, divby=size)  # or the kernel's vectors look unaligned

    return {
        "split_k_semaphore": flags,
        "split_k_workspace": cute.make_tensor(
            partials,
            cute.make_layout(
                (size, tiles_m, tiles_n, batch), stride=(1, elements(row), size, elements(matrix))
            ),
        ),
    }


def _gemm_object(design: Design, signature: Signature, arch: str) -> Any:
    """The library's kernel, told how tensors arrive: A as (m, k), B as (k, n), out as (m, n)."""
    import cutlass
    from quack import gemm_default_epi as library
    from quack.gemm_config import SplitKMode

    options: dict[str, Any] = (
        {"pingpong": design.pingpong, "is_persistent": True}
        if arch == HOPPER
        else {"use_clc_persistence": True}
    )
    if design.splits > 1:
        mode = SplitKMode.PARALLEL if design.in_any_order else SplitKMode.SERIAL
        options |= {"split_k": design.splits, "split_k_mode": mode}
    kind = library.GemmDefaultSm90 if arch == HOPPER else library.GemmDefaultSm100
    tile_k = () if design.tile_k_blocks == 1 else (design.tile_k(signature.a),)
    gemm = kind(
        cutlass.Float32, _cute_type(signature.a), (*design.tile, *tile_k), (*design.cluster, 1),
        **options,
    )  # fmt: skip
    # Its own convention has A as (m, k), B as (n, k). Swapped, its A is the problem's B.
    gemm.b_transposed = not design.swapped
    gemm.a_transposed = gemm.cd_transposed = design.swapped
    return gemm


def _sample_tensors(signature: Signature) -> tuple[Any, Any, Any]:
    """Stand-ins for a, b and out whose extents and strides are known at run time."""
    from cutlass import cute

    m, n, k = (cute.sym_int() for _ in range(3))
    batch = (cute.sym_int(),) if signature.op is Op.BMM else ()
    layout = signature.layout

    def tensor(dtype: DType, shape: tuple[Any, Any], row_major: bool) -> Any:
        def stride() -> Any:
            return cute.sym_int64(divisibility=8 * ALIGNMENT_BYTES // dtype.bits)

        outer = tuple(stride() for _ in batch)
        inner = (stride(), 1) if row_major else (1, stride())
        return cute.runtime.make_fake_tensor(
            _cute_type(dtype), (*batch, *shape), (*outer, *inner), assumed_align=ALIGNMENT_BYTES
        )

    return (
        tensor(signature.a, (m, k), layout.a_row_major),
        tensor(signature.b, (k, n), layout.b_row_major),
        tensor(signature.out, (m, n), True),
    )


def _cute_type(dtype: DType) -> Any:
    import cutlass

    return getattr(cutlass, CUTE_TYPES[dtype])
