"""Compiles quack's dense GEMM with this project's calling convention.

quack's function takes eleven arguments, among them tuples for epilogue and scheduler. A small
wrapper takes ``(a, b, out, stream)``, with scales and an addend before ``out``. After ``out`` comes
a workspace if thread blocks share memory, and on Hopper the number of concurrent clusters on the
device. The wrapper passes constants for the rest, and adds nothing to the device code.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nvgemm_runtime.bundle.calling_convention import (
    CLUSTERS,
    STREAM,
    WORKSPACE,
    CallingConvention,
)
from nvgemm_runtime.bundle.workspace import ZEROED_MULTIPLE_BYTES
from nvgemm_runtime.errors import ToolchainError, one_line
from nvgemm_runtime.gemm.epilogues import Addend
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, roles
from nvgemm_runtime.gemm.types import DType, ScaleRecipe

from .. import cute_dsl
from ..base import CLC
from ..cute_dsl.whole_imports import deferred_interrupts
from .designs import FLAG_BYTES, Design
from .epilogue import epilogue_arguments, has_own_epilogue, kernel_with_epilogue
from .families import family_of

ALIGNMENT_BYTES = 16
"""Alignment that TMA requires for addresses, and for strides other than 1."""

CUTE_TYPES = {
    DType.FP32: "Float32",
    DType.FP16: "Float16",
    DType.BF16: "BFloat16",
    DType.FP8_E4M3: "Float8E4M3FN",
    DType.FP8_E5M2: "Float8E5M2",
}
"""Class names in ``cutlass`` for the offered element types."""

MAX_SWIZZLE = 8
"""Most tiles along one dimension before the scheduler turns; quack's own default."""


@functools.cache
def import_library() -> None:
    """Imports quack's GEMMs (about 10 s with the compiler).

    The package's ``__init__`` imports norms, losses and an autotuner that needs Triton, which only
    CUDA builds of torch install. It is bypassed, except for the DSL extensions that it installs.

    Raises:
        ToolchainError: If part of it is missing.
    """
    try:
        spec = importlib.util.find_spec("quack")
        if spec is None:
            raise ImportError("no package quack")
        with deferred_interrupts():
            if "quack" not in sys.modules:
                sys.modules["quack"] = importlib.util.module_from_spec(spec)
            import quack.dsl
            import quack.gemm_default_epi  # noqa: F401
    except Exception as error:  # an incompatible compiler may raise anything
        raise ToolchainError(
            f"cannot compile quack's kernels: {type(error).__name__}: {one_line(str(error))}; "
            # The right version is installed, so an ordinary installation would change nothing.
            f"run: pip install --force-reinstall --no-deps quack-kernels=={_installed_version()}"
        ) from error


def _installed_version() -> str:
    return cute_dsl.installed_versions(("quack-kernels",), "quack's kernels")["quack-kernels"]


def compile_entry(design: Design, signature: Signature, arch: str) -> Any:
    """Compiles one design for a signature; may raise any compiler exception.

    Args:
        design: The design.
        signature: The signature.
        arch: Architecture, e.g. ``sm_90a``.
    """
    import_library()
    gemm = _gemm_object(design, signature, arch)
    parameters = calling_convention(design, signature, arch).parameters

    def launch(**arguments: Any) -> None:
        operands = (arguments["a"], arguments["b"])
        first, second = operands[::-1] if design.swapped else operands
        epilogue: dict[str, Any] = {}
        matrix = None
        if has_own_epilogue(signature):
            tensors = {role: arguments[role.value] for role in roles(signature)}
            epilogue, matrix = epilogue_arguments(signature, tensors, swapped=design.swapped)
        if design.splits > 1:
            epilogue |= _split_tensors(design, arch, arguments["out"], arguments[WORKSPACE])
        scheduler = scheduler_options(
            arguments.get(CLUSTERS), arguments[WORKSPACE] if design.dynamic else None
        )
        gemm(
            first, second, arguments["out"], matrix, gemm.EpilogueArguments(**epilogue),
            scheduler, None, arguments[STREAM], None, None,
        )  # fmt: skip

    return compile_launch(launch, _NAMES, _sample_tensors(signature), parameters, arch)


_NAMES = {
    "a b out stream": "multiply",
    "a b out workspace stream": "split_untold",
    "a b addend out stream": "add",
    "a b addend out workspace stream": "add_split_untold",
    "a b out clusters stream": "multiply_told",
    "a b out workspace clusters stream": "split",
    "a b addend out clusters stream": "add_told",
    "a b addend out workspace clusters stream": "add_split",
    "a b scale_a scale_b out stream": "scale",
    "a b scale_a scale_b out workspace stream": "scale_split_untold",
    "a b scale_a scale_b addend out stream": "scale_and_add",
    "a b scale_a scale_b addend out workspace stream": "scale_and_add_split_untold",
    "a b scale_a scale_b out clusters stream": "scale_told",
    "a b scale_a scale_b out workspace clusters stream": "scale_split",
    "a b scale_a scale_b addend out clusters stream": "scale_and_add_told",
    "a b scale_a scale_b addend out workspace clusters stream": "scale_and_add_split",
}
"""Names of entry functions by their parameters; see `compile_launch`."""


def calling_convention(design: Design, signature: Signature, arch: str) -> CallingConvention:
    """Returns the calling convention for a design's kernels."""
    clusters = family_of(arch).takes_clusters
    extras = {WORKSPACE: design.has_workspace, CLUSTERS: clusters, STREAM: True}
    parameters = (
        *(role.value for role in roles(signature)),
        *(name for name, is_passed in extras.items() if is_passed),
    )
    return CallingConvention(name=cute_dsl.FUNCTION_NAME, parameters=parameters)


def compile_launch(
    launch: Callable[..., None],
    names: Mapping[str, str],
    tensors: tuple[Any, ...],
    parameters: tuple[str, ...],
    arch: str,
) -> Any:
    """Compiles an entry function, which passes its arguments on to ``launch`` by name.

    Args:
        launch: Function with a keyword argument for each parameter.
        names: The entry function's name by its parameters, with spaces between them. The compiler
            writes it into the kernel: a new name changes the bytes.
        tensors: Sample tensors for the signature's roles, the first parameters.
        parameters: The calling convention's parameters.
        arch: Architecture.
    """
    from cuda.bindings.driver import CUstream
    from cutlass import Int32, cute

    def entry(*arguments: Any) -> None:
        launch(**dict(zip(parameters, arguments)))

    kinds = {CLUSTERS: Int32, STREAM: CUstream}
    entry.__name__ = names[" ".join(parameters)]
    entry.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=kinds.get(name, cute.Tensor),
            )
            for name in parameters
        ]
    )
    # Without preprocessing, the compiler reads the signature, not the source.
    return cute.compile[cute.GPUArch(arch), cute.EnableTVMFFI(True)](
        cute.jit(preprocess=False)(entry), *_sample_arguments(parameters, tensors)
    )


def _sample_arguments(parameters: tuple[str, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Builds sample values for all parameters; ``tensors`` holds the signature's, the first."""
    from cutlass import Int32, Uint8, cute

    makers = {
        WORKSPACE: lambda: cute.runtime.make_fake_tensor(
            Uint8, (cute.sym_int64(),), (1,), assumed_align=ALIGNMENT_BYTES
        ),
        CLUSTERS: lambda: Int32(1),
        STREAM: cute.runtime.make_fake_stream,
    }
    return (*tensors, *(makers[name]() for name in parameters[len(tensors) :]))


def kernel_options(design: Design, arch: str) -> dict[str, Any]:
    """Returns the scheduling options for the library's kernels on an architecture."""
    if family_of(arch).scheduler == CLC:
        return {"use_clc_persistence": True}
    return {"pingpong": design.pingpong, "is_persistent": True}


def scheduler_options(clusters: Any, counter: Any = None) -> Any:
    """Builds the library's scheduler arguments, which always need a number of clusters.

    ``counter`` is a workspace that begins with a dynamic schedule's counter.
    """
    from cutlass import Int32, cute
    from quack.tile_scheduler import TileSchedulerOptions

    options = {
        "max_active_clusters": Int32(1) if clusters is None else clusters,
        "max_swizzle_size": Int32(MAX_SWIZZLE),
    }
    if counter is not None:
        options["tile_count_semaphore"] = cute.recast_ptr(counter.iterator, dtype=Int32)
    return TileSchedulerOptions(**options)


def _split_tensors(design: Design, arch: str, out: Any, workspace: Any) -> dict[str, Any]:
    """Builds the tiles' counters and partial results in a workspace laid out by `workspace_of`.

    Both have an entry for every thread block in a cluster, even outside the result.
    """
    from cutlass import Float32, Int32, Int64, cute

    (m, n), (batch, rows, columns) = design.block_tile(arch), (1, *out.shape)[-3:]
    extents = (columns, rows) if design.swapped else (rows, columns)
    tiles_m, tiles_n = (
        cute.round_up(cute.ceil_div(extent, tile), multiple)
        for extent, tile, multiple in zip(extents, (m, n), design.cluster)
    )
    # 64 bits: a result may have more elements than 32 bits can count.
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
        return cute.assume(tiles * size, divby=size)  # else the kernel's vectors look unaligned

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
    """Builds the library's kernel for A as (m, k), B as (k, n) and out as (m, n)."""
    import cutlass
    from quack.gemm_config import SplitKMode

    options = kernel_options(design, arch)
    if design.splits > 1:
        mode = SplitKMode.PARALLEL if design.in_any_order else SplitKMode.SERIAL
        options |= {"split_k": design.splits, "split_k_mode": mode}
    kind = family_of(arch).gemm_with_default_epilogue()
    if has_own_epilogue(signature):
        activation = signature.epilogue.activation if signature.epilogue is not None else None
        kind = kernel_with_epilogue(kind, activation)
    tile_k = () if design.tile_k_blocks == 1 else (design.tile_k(signature.a),)
    # The library expects A as (m, k) and B as (n, k). If swapped, its A is the problem's B. It gets
    # the type of its A as an argument, and reads B's from the tensor, because fp8 types may differ.
    first = cute_type(signature.b if design.swapped else signature.a)
    gemm = kind(cutlass.Float32, first, (*design.tile, *tile_k), (*design.cluster, 1), **options)
    gemm.b_transposed = not design.swapped
    gemm.a_transposed = gemm.cd_transposed = design.swapped
    return gemm


def _sample_tensors(signature: Signature) -> tuple[Any, ...]:
    """Builds sample tensors for a signature, with dynamic extents and strides."""
    from cutlass import cute

    m, n, k = (cute.sym_int() for _ in range(3))
    batch = (cute.sym_int(),) if signature.op is Op.BMM else ()
    layout = signature.layout

    def tensor(role: Role, shape: tuple[Any, ...], strides: tuple[Any, ...], align: int) -> Any:
        dtype = cute_type(role_dtype(signature, role))
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)

    def matrix(role: Role, shape: tuple[Any, Any], row_major: bool) -> Any:
        def stride() -> Any:
            bits = role_dtype(signature, role).bits
            return cute.sym_int64(divisibility=8 * ALIGNMENT_BYTES // bits)

        inner = (stride(), 1) if row_major else (1, stride())
        strides = (*(stride() for _ in batch), *inner)
        return tensor(role, (*batch, *shape), strides, ALIGNMENT_BYTES)

    def scales(role: Role) -> Any:
        align = role_dtype(signature, role).bits // 8
        if signature.scales is ScaleRecipe.FP32_TENSOR:
            return tensor(role, (1,), (1,), align)
        # The launcher checks each extent alone; the runtime checks that one of them is 1.
        shape = (m, cute.sym_int()) if role is Role.SCALE_A else (cute.sym_int(), n)
        return tensor(role, shape, (cute.sym_int64(), 1), align)

    samples = {
        Role.A: lambda: matrix(Role.A, (m, k), layout.a_row_major),
        Role.B: lambda: matrix(Role.B, (k, n), layout.b_row_major),
        Role.SCALE_A: lambda: scales(Role.SCALE_A),
        Role.SCALE_B: lambda: scales(Role.SCALE_B),
        Role.ADDEND: lambda: (
            tensor(Role.ADDEND, (n,), (1,), ALIGNMENT_BYTES)
            if signature.epilogue is not None and signature.epilogue.addend is Addend.ROW
            else matrix(Role.ADDEND, (m, n), True)
        ),
        Role.OUT: lambda: matrix(Role.OUT, (m, n), True),
    }
    return tuple(samples[role]() for role in roles(signature))


def cute_type(dtype: DType) -> Any:
    """Returns the DSL's type. Imports the compiler."""
    import cutlass

    return getattr(cutlass, CUTE_TYPES[dtype])
