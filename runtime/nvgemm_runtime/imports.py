"""Symbols that kernels import from the two libraries that they are loaded beside."""

from __future__ import annotations

from dataclasses import dataclass

from .format import Header

_FFI_PREFIX = "TVMFFI"
"""What the names of TVM-FFI's C functions begin with (``tvm/ffi/c_api.h``); the others that kernels
import are of the library for device code."""

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

NEWEST_RUN = (4, 8)
"""Newest minor version of the library that kernels were run with; docs/installing.md says how."""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What kernels import.

    Attributes:
        of_ffi: From TVM-FFI.
        of_device: From the library for device code.
    """

    of_ffi: frozenset[str]
    of_device: frozenset[str]


def imported_symbols(header: Header) -> Imports:
    """What a bundle's kernels import: what it states, else what kernels do that are known.

    Bundles of format version 1 do not state it.
    """
    stated = header.imports
    if not stated:
        return Imports(of_ffi=FFI_SYMBOLS, of_device=DEVICE_SYMBOLS)
    of_ffi = frozenset(name for name in stated if name.startswith(_FFI_PREFIX))
    return Imports(of_ffi=of_ffi, of_device=frozenset(stated) - of_ffi)
