"""Symbols that kernels import from the two libraries that they are loaded beside."""

from __future__ import annotations

from dataclasses import dataclass

from .format import Header, Kernel

_FFI_PREFIXES = ("TVMFFI",)
"""What the names of TVM-FFI's C functions begin with (``tvm/ffi/c_api.h``)."""

_DEVICE_PREFIXES = ("CuteDSLRT", "_cu", "cuda_dialect")
"""What the names of the functions of the library for device code begin with. Source: its dynamic
symbols in 4.5.2 to 4.8.1; the functions of CUDA that it wraps begin with ``_cu``."""

FFI_SYMBOLS = frozenset(
    {
        "TVMFFIEnvGetStream",
        "TVMFFIErrorSetRaisedFromCStr",
        "TVMFFIErrorSetRaisedFromCStrParts",
    }
)

DEVICE_SYMBOLS = frozenset(
    {
        "CuteDSLRT_TVMFFISetRaisedCudaError",
        "_cuKernelGetAttribute",
        "_cudaDeviceGetAttribute",
        "_cudaFuncSetAttribute",
        "_cudaGetDevice",
        "_cudaKernelSetAttributeForDevice",
        "_cudaLaunchKernelEx",
        "_cudaLibraryGetKernel",
        "_cudaLibraryLoadData",
        "_cudaSetDevice",
        "cuda_dialect_init_library_once",
        "cuda_dialect_unload_library_once",
    }
)
"""Symbols that kernels import from libtvm_ffi.so and from libcute_dsl_runtime.so.

Source: the objects of 96 kernels that cutlass-dsl 4.8.1 compiled for sm_90a, sm_100a, sm_100f and
sm_103a (dense persistent with both schedulers, preferred cluster, epilogue fusion, TGV, SM90,
SM80) all use exactly these; each was found among the exported symbols of libcute_dsl_runtime.so
4.8.1 (cu13) or libtvm_ffi.so 0.1.15.
"""

FIRST_RELEASE = {"CuteDSLRT_TVMFFISetRaisedCudaError": "4.7"}
"""First release of the library that exports a symbol, of symbols that older releases lack.

Source: the dynamic symbols of nvidia-cutlass-dsl-libs-cu13 4.5.2, 4.6.3, 4.7.0, 4.7.1, 4.8.0 and
4.8.1; each of the other `DEVICE_SYMBOLS` is in all of them, and `FFI_SYMBOLS` in apache-tvm-ffi
0.1.9, 0.1.11 and 0.1.15.post2."""

RELEASES_ITS_LOCK = "_cuLibraryLoadData"
"""A symbol of the releases of the library whose ``cuda_dialect_init_library_once``, which loads a
kernel's device code, releases its lock where that fails. Others wait for it for ever at the next
kernel.

Source: the machine code of that function in 4.7.0 and 4.7.1, which lack the symbol and return from
a failure with the lock held, and in 4.8.0 and 4.8.1; on an H200 the next launch hung with 4.7.1."""

NEWEST_RUN = (4, 8)
"""Newest minor version of the library that kernels were run with: see docs/guide/installing.md."""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What a kernel imports from TVM-FFI, and from the library for device code."""

    of_ffi: frozenset[str]
    of_device: frozenset[str]


_IMPORTS_OF_KNOWN_KERNELS = Imports(of_ffi=FFI_SYMBOLS, of_device=DEVICE_SYMBOLS)


def needed_symbols(header: Header, kernel: Kernel) -> Imports:
    """What a kernel imports: as it states, else as its bundle does, else what all known ones do.

    Bundles of format version 1 do not state it. Symbols whose names are of neither library, such as
    those of the C library, are left to the loader, which names those that it does not find.
    """
    stated = header.imports if kernel.imports is None else kernel.imports
    if stated is None:
        return _IMPORTS_OF_KNOWN_KERNELS
    return Imports(
        of_ffi=frozenset(name for name in stated if name.startswith(_FFI_PREFIXES)),
        of_device=frozenset(name for name in stated if name.startswith(_DEVICE_PREFIXES)),
    )
