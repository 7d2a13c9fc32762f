"""cuBLASLt through ctypes: the algorithms that its heuristic suggests for an fp16 product.

The library is the one that torch has loaded. Names, values, sizes and types of attributes are those
of ``cublasLt.h`` of CUDA 13.0 (the package nvidia-cublas 13.1.0). Descriptors are made and kept by
the library; only a heuristic result has a layout that is written out here. As to rows and columns,
see `cublas`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.hgemm.cublas import (
    CUBLAS_COMPUTE_32F,
    CUBLAS_OP_N,
    CUBLAS_STATUS_SUCCESS,
    CUDA_R_16F,
    CUDA_R_32F,
    ONE,
    WORKSPACE_BYTES,
    ZERO,
    ProtocolLayout,
    check,
    loaded_library,
    pointer,
)

if TYPE_CHECKING:
    import torch

CUBLASLT_MATMUL_DESC_TRANSA = 3
CUBLASLT_MATMUL_DESC_TRANSB = 4
CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque, 64 bytes."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it needs."""

    _fields_ = (
        ("algo", Algo),
        ("workspaceSize", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, kw_only=True)
class Descriptors:
    """Handles that describe one size to cuBLASLt.

    Attributes:
        operation: cublasLtMatmulDesc_t.
        b, a, out: cublasLtMatrixLayout_t of each.
    """

    operation: ctypes.c_void_p
    b: ctypes.c_void_p
    a: ctypes.c_void_p
    out: ctypes.c_void_p


class CublasLt:
    """cuBLASLt handle with a workspace, on the current stream."""

    def __init__(self) -> None:
        import torch

        self.library = loaded_library("libcublasLt.so")
        self.handle = ctypes.c_void_p()
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        check(self.library.cublasLtCreate(ctypes.byref(self.handle)), "cublasLtCreate")

    def version(self) -> int:
        """Returns the library version, e.g. 130100 for 13.1.0."""
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(self.library.cublasLtGetVersion())

    def plan(self, layout: ProtocolLayout, m: int, n: int, k: int) -> Plan:
        """Describes a product [m, k] @ [k, n] in fp16 with fp32 sums."""
        return Plan(self, describe(self.library, layout, m, n, k))


class Plan:
    """Algorithms for one size; a context manager that frees its descriptors."""

    def __init__(self, lt: CublasLt, descriptors: Descriptors) -> None:
        self._lt = lt
        self._descriptors = descriptors

    def suggestions(self, count: int) -> list[Algo]:
        """Returns up to ``count`` algorithms that the heuristic suggests, best first."""
        library, descriptors = self._lt.library, self._descriptors
        preference = ctypes.c_void_p()
        made = library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        check(made, "cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        status = library.cublasLtMatmulPreferenceSetAttribute(
            preference,
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            ctypes.byref(limit),
            ctypes.c_size_t(ctypes.sizeof(limit)),
        )
        check(status, "cublasLtMatmulPreferenceSetAttribute")
        found = (HeuristicResult * count)()
        returned = ctypes.c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._lt.handle,
            descriptors.operation,
            descriptors.b,
            descriptors.a,
            descriptors.out,
            descriptors.out,
            preference,
            count,
            found,
            ctypes.byref(returned),
        )
        check(status, "cublasLtMatmulAlgoGetHeuristic")
        destroyed = library.cublasLtMatmulPreferenceDestroy(preference)
        check(destroyed, "cublasLtMatmulPreferenceDestroy")
        results = found[: returned.value]
        return [one.algo for one in results if one.state == CUBLAS_STATUS_SUCCESS]

    def multiply(self, algo: Algo, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Starts ``out = a @ b`` by an algorithm that was suggested for this size."""
        import torch

        descriptors = self._descriptors
        status = self._lt.library.cublasLtMatmul(
            self._lt.handle,
            descriptors.operation,
            ctypes.byref(ONE),
            pointer(b),
            descriptors.b,
            pointer(a),
            descriptors.a,
            ctypes.byref(ZERO),
            pointer(out),
            descriptors.out,
            pointer(out),
            descriptors.out,
            ctypes.byref(algo),
            pointer(self._lt.workspace),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        check(status, "cublasLtMatmul")

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        library, descriptors = self._lt.library, self._descriptors
        check(library.cublasLtMatmulDescDestroy(descriptors.operation), "cublasLtMatmulDescDestroy")
        for matrix in (descriptors.b, descriptors.a, descriptors.out):
            check(library.cublasLtMatrixLayoutDestroy(matrix), "cublasLtMatrixLayoutDestroy")


def describe(library: ctypes.CDLL, layout: ProtocolLayout, m: int, n: int, k: int) -> Descriptors:
    """Makes a product's descriptors; needs no GPU."""
    operation = ctypes.c_void_p()
    made = library.cublasLtMatmulDescCreate(ctypes.byref(operation), CUBLAS_COMPUTE_32F, CUDA_R_32F)
    check(made, "cublasLtMatmulDescCreate")
    for attribute, value in (
        (CUBLASLT_MATMUL_DESC_TRANSA, layout.b_operation),
        (CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N),
    ):
        number = ctypes.c_int32(value)
        status = library.cublasLtMatmulDescSetAttribute(
            operation, attribute, ctypes.byref(number), ctypes.c_size_t(ctypes.sizeof(number))
        )
        check(status, "cublasLtMatmulDescSetAttribute")
    leading = layout.b_leading(n, k)
    return Descriptors(
        operation=operation,
        b=_matrix(library, leading, n * k // leading),
        a=_matrix(library, k, m),
        out=_matrix(library, n, m),
    )


def _matrix(library: ctypes.CDLL, rows: int, columns: int) -> ctypes.c_void_p:
    """Describes a dense column-major fp16 matrix."""
    matrix = ctypes.c_void_p()
    status = library.cublasLtMatrixLayoutCreate(
        ctypes.byref(matrix),
        CUDA_R_16F,
        ctypes.c_uint64(rows),
        ctypes.c_uint64(columns),
        ctypes.c_int64(rows),
    )
    check(status, "cublasLtMatrixLayoutCreate")
    return matrix
