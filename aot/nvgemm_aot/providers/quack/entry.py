"""Compiles quack's dense GEMM behind the calling convention of this project.

quack's function takes eleven arguments, among them tuples for epilogue and scheduler. A small
function around it takes ``(a, b, out, stream)`` and passes constants for the rest; it adds nothing
to the device code.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType

from .designs import HOPPER, Design

ALIGNMENT_BYTES = 16
"""What TMA demands of addresses, and of strides other than 1."""

CUTE_TYPES = {
    DType.FP32: "Float32",
    DType.FP16: "Float16",
    DType.BF16: "BFloat16",
}
"""By element type: its class in ``cutlass``, for the types that are offered."""

MAX_SWIZZLE = 8
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


def compile_entry(
    design: Design, signature: Signature, arch: str, clusters_at_once: int | None
) -> Any:
    """Compile one design for a signature; may raise any exception of the compiler.

    Args:
        design: The design.
        signature: What to compute.
        arch: Architecture, e.g. ``sm_90a``.
        clusters_at_once: How many clusters the device runs at once; compiled into the launch of a
            static-persistent kernel, and None for others.
    """
    import_library()
    from cuda.bindings.driver import CUstream
    from cutlass import Int32, cute
    from quack.tile_scheduler import TileSchedulerOptions

    gemm = _gemm_object(design, signature, arch)

    def call(a: Any, b: Any, out: Any, stream: Any) -> None:
        first, second = (b, a) if design.swapped else (a, b)
        epilogue = gemm.EpilogueArguments()
        scheduler = TileSchedulerOptions(
            max_active_clusters=Int32(clusters_at_once or 1), max_swizzle_size=Int32(MAX_SWIZZLE)
        )
        gemm(first, second, out, None, epilogue, scheduler, None, stream, None, None)

    call.__annotations__ = {"a": cute.Tensor, "b": cute.Tensor, "out": cute.Tensor}
    call.__annotations__["stream"] = CUstream
    return cute.compile[cute.GPUArch(arch), cute.EnableTVMFFI(True)](
        cute.jit(call), *_sample_tensors(signature), cute.runtime.make_fake_stream()
    )


def _gemm_object(design: Design, signature: Signature, arch: str) -> Any:
    """The library's kernel, told how tensors arrive: A as (m, k), B as (k, n), out as (m, n)."""
    import cutlass
    from quack import gemm_default_epi as library

    options: dict[str, Any] = (
        {"pingpong": design.pingpong, "is_persistent": True}
        if arch == HOPPER
        else {"use_clc_persistence": True}
    )
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
