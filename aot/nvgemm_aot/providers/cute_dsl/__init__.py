"""Compiles and exports ``@cute.jit`` functions for all CuTe-DSL providers.

`cute_setup` selects the compiler and prepares the process. The names in ``__all__`` belong to the
interface for external providers (`interface`). Importing this module is cheap; the compiler is
imported when a function first needs it.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import CompileError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.target import PLATFORMS
from nvgemm_runtime.gemm.types import DType

from .cuda_errors import raise_cuda_errors_by_name
from .cute_setup import CUTLASS_IR, DISTRIBUTIONS, installed_versions, set_environment

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


@dataclass(frozen=True, kw_only=True)
class _HostCode:
    """Host code target: features that every processor on a platform has.

    Left alone, the compiler targets the build machine's processor: kernels built on one with
    AVX-512 would crash elsewhere.
    """

    triple: str
    cpu: str
    features: str

    def __str__(self) -> str:
        return f"host {self.cpu} {self.features}".rstrip()


_HOSTS = {
    "linux_x86_64": _HostCode(triple="x86_64-unknown-linux-gnu", cpu="x86-64", features="+sse2"),
    # LLVM's `generic` is Armv8.0-A with floating point and Advanced SIMD only.
    "linux_aarch64": _HostCode(triple="aarch64-unknown-linux-gnu", cpu="generic", features=""),
}
"""Host code targets by platform."""

LAUNCHER = "CUDA errors by name"
"""Name for what `export_object` changes in launchers beyond the recipe: part of the cache key. GPU
code stays the same, so measurements made before still count."""

FUNCTION_NAME = "gemm"
"""Exported function name. TVM-FFI adds a prefix: the symbol is ``__tvm_ffi_gemm``."""

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
"""Element types' class names in ``cutlass``."""


def recipe(provider_recipe: str) -> str:
    """Returns the recipe for a provider that uses `export_object`: its own text plus host code.

    The host code is that for the default platform; `for_platform` substitutes another.
    """
    return f"{provider_recipe}, {_HOSTS[PLATFORMS[0]]}"


def for_platform(text: str, platform: str) -> str:
    """Returns a recipe for a host platform. A recipe without host code stays the same."""
    host = _HOSTS.get(platform)
    return text if host is None else text.replace(str(_HOSTS[PLATFORMS[0]]), str(host))


@functools.cache
def warm_up() -> None:
    """Compiles an empty function, so that no kernel is a process's first compile.

    A first compile must not target another architecture; see NVIDIA/cutlass#2859.
    """
    from cutlass import cute

    @cute.jit  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    cute.compile(nothing)


def export_object(compiled: Any, platform: str = PLATFORMS[0]) -> bytes:
    """Exports a compiled function as a relocatable object that runs on any host of a platform.

    Its launcher reports CUDA errors as `raise_cuda_errors_by_name` says.
    """
    host = _HOSTS[platform]
    raise_cuda_errors_by_name(compiled.ir_module)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.o"
        if platform == PLATFORMS[0]:
            _set_host_code(compiled.ir_module, host)
            compiled.export_to_c(object_file_path=str(path), function_name=FUNCTION_NAME)
        else:
            _export_for(host, compiled, path)
        return path.read_bytes()


def _export_for(host: _HostCode, compiled: Any, path: Path) -> None:
    """Exports an object for another processor; ``export_to_c`` supports only this machine's."""
    from cutlass.base_dsl.export.export import get_export_module
    from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import rename_tvm_ffi_function

    own_symbol, symbol = f"__tvm_ffi_{compiled.function_name}", f"__tvm_ffi_{FUNCTION_NAME}"
    module = get_export_module(
        compiled.ir_module, f"__cute_internal_{FUNCTION_NAME}", preserve_symbols={own_symbol}
    )
    rename_tvm_ffi_function(module, compiled.function_name, FUNCTION_NAME)
    _set_host_code(module, None)
    engine: Any = importlib.import_module(f"{CUTLASS_IR}._mlirExecutionEngine")
    engine.dump_object_file_pic(
        module,
        str(path),
        symbol,
        opt_level=3,  # as ``export_to_c``
        host_triple=host.triple,
        host_cpu=host.cpu,
        host_features=host.features,
    )


def cute_type(dtype: DType) -> Any:
    """Returns an element type's class in ``cutlass``.

    Raises:
        KeyError: If tensors cannot have the type, as for types below one byte.
    """
    import cutlass

    return getattr(cutlass, _CUTE_TYPES[dtype])


def sample_tensors(signature: Signature, alignment_bytes: int) -> dict[str, Any]:
    """Builds sample tensors for a plain GEMM, by name: ``a``, ``b``, ``out``.

    Shapes: A (m, k), B (k, n), out (m, n); for ``bmm``, with the batch first. Extents and strides
    are dynamic, except for the stride of 1 along each operand's contiguous dimension. Shared
    extents are one symbol.

    Args:
        signature: Signature of an ``mm`` or ``bmm``.
        alignment_bytes: Alignment of addresses, and of strides other than 1, in bytes. The compiled
            launcher checks addresses against it.
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
    function: Any,
    samples: Iterable[Any],
    *,
    arch: str,
    name: str = "kernel",
    platform: str = PLATFORMS[0],
) -> bytes:
    """Compiles a ``@cute.jit`` function for an architecture and exports it.

    Args:
        function: Launch function. Its last parameter, annotated as
            ``cuda.bindings.driver.CUstream``, is the stream.
        samples: Sample values for its other arguments, such as those from `sample_tensors`.
        arch: Architecture, e.g. ``sm_90a``.
        name: Name in messages.
        platform: The target's host platform, e.g. ``linux_aarch64``.

    Returns:
        A relocatable object, as `Provider.compile` must return.

    Raises:
        CompileError: If the compiler fails, with the compiler's own words.
    """
    from cutlass import cute

    warm_up()
    try:
        compiled = cute.compile[cute.GPUArch(arch), cute.EnableTVMFFI(True)](
            function, *samples, cute.runtime.make_fake_stream()
        )
        return export_object(compiled, platform)
    except OSError:
        raise
    except Exception as error:  # compiler passes may raise anything
        raise CompileError(f"{name} for {arch}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Returns a compiler error's class and first line; the rest may fill pages."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _set_host_code(module: Any, host: _HostCode | None) -> None:
    """Sets or clears the processor of host functions, for which the exporter has no option."""
    from cutlass._mlir import ir

    with module.context:
        for operation in module.body.operations:
            if operation.operation.name != "llvm.func":
                continue
            attributes = operation.operation.attributes
            if host is not None:
                features = ir.Attribute.parse(f'#llvm.target_features<["{host.features}"]>')
                attributes["target_cpu"] = ir.StringAttr.get(host.cpu)
                attributes["target_features"] = features
                continue
            for name in ("target_cpu", "target_features"):
                if name in attributes:
                    del attributes[name]
