"""Symbols that kernels import from TVM-FFI and the device-code library."""

from __future__ import annotations

from dataclasses import dataclass

from .format import Header, Kernel

_FFI_PREFIXES = ("TVMFFI",)
"""Name prefixes for TVM-FFI's C functions (``tvm/ffi/c_api.h``)."""

_DEVICE_PREFIXES = ("CuteDSLRT", "_cu", "cuda_dialect")
"""Name prefixes for the device-code library's functions. Source: its dynamic symbols in 4.5.2 to
4.8.1; its wrappers for CUDA functions begin with ``_cu``."""

FFI_SYMBOLS = frozenset(
    {
        "TVMFFIEnvGetStream",
        "TVMFFIErrorSetRaisedFromCStr",
        "TVMFFIErrorSetRaisedFromCStrParts",
    }
)

DEVICE_SYMBOLS = frozenset(
    {
        "_cuKernelGetAttribute",
        "_cudaDeviceGetAttribute",
        "_cudaFuncSetAttribute",
        "_cudaGetDevice",
        "_cudaKernelSetAttributeForDevice",
        "_cudaLaunchKernelEx",
        "_cudaLibraryGetKernel",
        "_cudaLibraryLoadData",
        "_cudaSetDevice",
        "cuda_dialect_get_error_name",
        "cuda_dialect_init_library_once",
        "cuda_dialect_unload_library_once",
    }
)
"""Symbols that kernels import from libtvm_ffi.so and libcute_dsl_runtime.so.

Source: objects for 96 kernels that cutlass-dsl 4.8.1 compiled for sm_90a, sm_100a, sm_100f and
sm_103a (dense persistent with both schedulers, preferred cluster, epilogue fusion, TGV, SM90, SM80)
all use exactly these, ``cuda_dialect_get_error_name`` in place of `EARLIER_SYMBOLS` since the
build changes the error path. Dynamic symbols: nvidia-cutlass-dsl-libs-cu13 4.5.2, 4.6.0, 4.6.2,
4.6.3, 4.7.0, 4.7.1, 4.8.0 and 4.8.1 export `DEVICE_SYMBOLS`, and apache-tvm-ffi 0.1.9, 0.1.11 and
0.1.15.post2 `FFI_SYMBOLS`."""

EARLIER_SYMBOLS = frozenset({"CuteDSLRT_TVMFFISetRaisedCudaError"})
"""Further symbols that kernels import which were built before 2026-11-28."""

FIRST_RELEASE = {"CuteDSLRT_TVMFFISetRaisedCudaError": "4.7"}
"""First library release that exports a symbol, for symbols that older releases lack.

Source: as for `DEVICE_SYMBOLS`."""

RELEASES_ITS_LOCK = "_cuLibraryLoadData"
"""Symbol in library releases that unlock if a kernel's device code fails to load.

``cuda_dialect_init_library_once`` loads the code. Without the unlock, the next kernel waits for
ever.

Source: that function's machine code in 4.5.2, 4.6.0, 4.6.2, 4.7.0 and 4.7.1, which lack the symbol
and return from a failure with the lock held, and in 4.8.0 and 4.8.1. The next launch hung on an
H200 with 4.7.1, and without a driver with 4.5.2, 4.6.0, 4.6.2 and 4.7.1."""

OLDEST_RUN = "4.5.2"
"""Oldest library version that kernels were run with: see docs/guide/installing.md."""

NEWEST_RUN = (4, 8)
"""Newest minor library version that kernels were run with: see docs/guide/installing.md."""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """Symbols that a kernel imports from TVM-FFI and from the device-code library."""

    ffi: frozenset[str]
    device: frozenset[str]


_IMPORTS_OF_KNOWN_KERNELS = Imports(ffi=FFI_SYMBOLS, device=DEVICE_SYMBOLS | EARLIER_SYMBOLS)


def needed_symbols(header: Header, kernel: Kernel) -> Imports:
    """Returns a kernel's imports: its own list, else its bundle's, else all known kernels' imports.

    Bundles in format version 1 have no list. Symbols from neither library, such as the C library's,
    are left to the loader, which names the missing ones.
    """
    stated = header.imports if kernel.imports is None else kernel.imports
    if stated is None:
        return _IMPORTS_OF_KNOWN_KERNELS
    return Imports(
        ffi=frozenset(name for name in stated if name.startswith(_FFI_PREFIXES)),
        device=frozenset(name for name in stated if name.startswith(_DEVICE_PREFIXES)),
    )
