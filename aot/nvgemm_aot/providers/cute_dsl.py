"""The CuTe-DSL compiler, for any provider of ``@cute.jit`` functions: set up, compile, export.

The names in ``__all__`` are part of the interface for providers of other packages (`interface`).
Importing this module is cheap; the compiler is imported when a function first needs it.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import CompileError, ToolchainError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType

__all__ = [
    "DISTRIBUTIONS",
    "FUNCTION_NAME",
    "compile_object",
    "cute_type",
    "export_object",
    "installed_versions",
    "recipe",
    "sample_tensors",
    "set_environment",
    "warm_up",
]

_log = logging.getLogger(__name__)

DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
"""Distributions of the compiler, whose versions shape the code of every ``@cute.jit`` function."""

HOST_CPU = "x86-64"
HOST_FEATURES = "+sse2"
"""What every processor of the platform has. Left alone, the compiler writes host code for the
processor of the build machine: kernels built on one with AVX-512 would crash elsewhere."""

FUNCTION_NAME = "gemm"
"""Name under which kernels are exported, as TVM-FFI counts: the symbol is ``__tvm_ffi_gemm``."""

_COMPILER_VARIABLES = ("CUTE_DSL_", "CUTLASS_")
"""Prefixes of the environment variables that the compiler reads."""

_ARCHITECTURE_VARIABLE, _ARCHITECTURE = "CUTE_DSL_ARCH", "sm_100a"
"""The architecture that the compiler assumes without a GPU; each kernel names its own target.

Without this variable, the compiler asks the driver. If all GPUs are hidden, it does so over a
hundred times: 4 s a process on a machine with an H200, and 90 s with 16 processes at once.
"""


_CUTE_TYPES = {
    DType.FP32: "Float32",
    DType.FP16: "Float16",
    DType.BF16: "BFloat16",
    DType.FP8_E4M3: "Float8E4M3FN",
    DType.FP8_E5M2: "Float8E5M2",
    DType.INT32: "Int32",
    DType.INT8: "Int8",
    DType.UINT8: "Uint8",
}
"""By element type: its class in ``cutlass``."""


def recipe(own: str) -> str:
    """Recipe of a provider that exports by `export_object`: its own text and the host code's."""
    return f"{own}, host {HOST_CPU} {HOST_FEATURES}"


def installed_versions(distributions: Iterable[str], kernels: str) -> dict[str, str]:
    """Versions of what compiles some kernels, which the message calls ``kernels``.

    Raises:
        ToolchainError: If a distribution is not installed.
    """
    try:
        return {name: version(name) for name in distributions}
    except PackageNotFoundError as error:
        raise ToolchainError(
            f"cannot compile {kernels}: {error.name} is not installed; "
            "run: pip install 'nvgemm-aot[build]'"
        ) from error


def set_environment(also: tuple[str, ...] = ()) -> None:
    """Drop the variables that change the compiler's code, which cache keys do not cover.

    Args:
        also: Prefixes of further variables to drop, of the library that the compiler is to serve.
    """
    prefixes = (*_COMPILER_VARIABLES, *also)
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        value = os.environ.pop(name)
        if (name, value) != (_ARCHITECTURE_VARIABLE, _ARCHITECTURE):
            _log.warning("%s=%s is ignored by builds", name, value)
    os.environ[_ARCHITECTURE_VARIABLE] = _ARCHITECTURE


@functools.cache
def warm_up() -> None:
    """Compile an empty function: a process's first compile must not be for another architecture.

    See NVIDIA/cutlass#2859.
    """
    from cutlass import cute

    @cute.jit  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    cute.compile(nothing)


def export_object(compiled: Any) -> bytes:
    """A compiled function as a relocatable object, with host code for `HOST_CPU`."""
    _use_baseline_host_code(compiled.ir_module)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.o"
        compiled.export_to_c(object_file_path=str(path), function_name=FUNCTION_NAME)
        return path.read_bytes()


def cute_type(dtype: DType) -> Any:
    """The class in ``cutlass`` of an element type.

    Raises:
        KeyError: If it has none that a tensor can be made of, as types of less than a byte.
    """
    import cutlass

    return getattr(cutlass, _CUTE_TYPES[dtype])


def sample_tensors(signature: Signature, alignment_bytes: int) -> dict[str, Any]:
    """Stand-ins for A, B and the result of a plain product, by name: ``a``, ``b``, ``out``.

    A has the extents (m, k), B (k, n), the result (m, n); of ``bmm``, with the batch first. Extents
    and strides are read at run time, but for the stride of 1 along which the signature's layout has
    each operand contiguous. Shared extents are one symbol.

    Args:
        signature: What is computed, of ``mm`` or ``bmm``.
        alignment_bytes: What addresses, and strides other than 1 in bytes, are multiples of; the
            launcher that the compiler writes demands it of addresses.
    """
    from cutlass import cute

    m, n, k = (cute.sym_int() for _ in range(3))
    batch = (cute.sym_int(),) if signature.op is Op.BMM else ()

    def tensor(dtype: DType, shape: tuple[Any, Any], row_major: bool) -> Any:
        def stride() -> Any:
            return cute.sym_int64(divisibility=max(1, 8 * alignment_bytes // dtype.bits))

        inner = (stride(), 1) if row_major else (1, stride())
        return cute.runtime.make_fake_tensor(
            cute_type(dtype),
            (*batch, *shape),
            (*(stride() for _ in batch), *inner),
            assumed_align=alignment_bytes,
        )

    layout = signature.layout
    return {
        "a": tensor(signature.a, (m, k), layout.a_row_major),
        "b": tensor(signature.b, (k, n), layout.b_row_major),
        "out": tensor(signature.out, (m, n), True),
    }


def compile_object(
    function: Any, samples: Iterable[Any], *, arch: str, name: str = "kernel"
) -> bytes:
    """Compile a ``@cute.jit`` function for an architecture, and export it.

    Args:
        function: What is launched; its last parameter, annotated as
            ``cuda.bindings.driver.CUstream``, is the stream.
        samples: Stand-ins for its other arguments, such as those of `sample_tensors`.
        arch: Architecture, e.g. ``sm_90a``.
        name: What a message calls it.

    Returns:
        A relocatable object, as `Provider.compile` must give it.

    Raises:
        CompileError: If the compiler refuses it, with the compiler's own words.
    """
    from cutlass import cute

    warm_up()
    try:
        compiled = cute.compile[cute.GPUArch(arch), cute.EnableTVMFFI(True)](
            function, *samples, cute.runtime.make_fake_stream()
        )
        return export_object(compiled)
    except OSError:
        raise
    except Exception as error:  # the compiler raises whatever its passes raise
        raise CompileError(f"{name} for {arch}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The class and the first line of an error of the compiler, which may print pages."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _use_baseline_host_code(module: Any) -> None:
    """Set the processor of host functions to `HOST_CPU`; the exporter has no option for it."""
    from cutlass._mlir import ir

    with module.context:
        features = ir.Attribute.parse(f'#llvm.target_features<["{HOST_FEATURES}"]>')
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                operation.operation.attributes["target_cpu"] = ir.StringAttr.get(HOST_CPU)
                operation.operation.attributes["target_features"] = features
