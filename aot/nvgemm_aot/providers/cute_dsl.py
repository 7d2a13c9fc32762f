"""The CuTe-DSL compiler, for any provider of ``@cute.jit`` functions: set up, compile, export.

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

from nvgemm_runtime.errors import ToolchainError

_log = logging.getLogger(__name__)

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
