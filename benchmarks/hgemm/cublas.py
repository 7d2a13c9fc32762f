"""cuBLAS through ctypes, for fp16 products, from the library that torch has loaded.

Names and values are those of ``cublas_api.h`` and ``library_types.h`` of CUDA 13.0 (the package
nvidia-cublas 13.1.0), which gives them with the functions' arguments.

Matrices here are row-major [m, k] and [k, n], cuBLAS's are column-major. A row-major matrix is its
own transpose to cuBLAS, so it is asked for C^T [n, m] = B^T A^T: B comes first.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvgemm_runtime.gemm.problem import Layout

if TYPE_CHECKING:
    import torch

CUBLAS_STATUS_SUCCESS = 0
CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT = -1
CUDA_R_32F, CUDA_R_16F = 0, 2

ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)
"""Scales for the product and the former result."""

WORKSPACE_BYTES = 32 << 20
"""Workspace that cuBLAS' documents recommend for Hopper; torch uses the same."""


class ProtocolLayout(str, enum.Enum):
    """Layouts by the names in the protocol, which are those in the call to cuBLAS.

    Both have A row-major; NN has B row-major, too, TN column-major. By the letters of manifests,
    which call row-major ``t``, they are ``tt`` and ``tn``.
    """

    NN = "nn"
    TN = "tn"

    @property
    def layout(self) -> Layout:
        """The same layout in the project's terms."""
        return Layout.TT if self is ProtocolLayout.NN else Layout.TN

    @property
    def b_operation(self) -> int:
        """Operation on B by cuBLAS, which comes first."""
        return CUBLAS_OP_N if self is ProtocolLayout.NN else CUBLAS_OP_T

    def b_leading(self, n: int, k: int) -> int:
        """B's leading dimension, in elements."""
        return n if self is ProtocolLayout.NN else k


def loaded_library(name: str) -> ctypes.CDLL:
    """Returns a library that torch's import has loaded, e.g. ``libcublas.so``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(f"{name}."):
            return ctypes.CDLL(f"/{path}")
    raise click.ClickException(f"torch has loaded no {name}; a build of torch with CUDA does")


def check(status: int, what: str) -> None:
    """Raises for a status other than success."""
    if status != CUBLAS_STATUS_SUCCESS:
        raise click.ClickException(f"{what} gave status {status} (cublasStatus_t in cublas_api.h)")


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Returns a tensor's address."""
    return ctypes.c_void_p(tensor.data_ptr())


class Cublas:
    """cuBLAS handle with a workspace, on the current stream."""

    def __init__(self) -> None:
        import torch

        self._library = loaded_library("libcublas.so")
        self._handle = ctypes.c_void_p()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._stream: int | None = None
        check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate_v2")

    def _use_current_stream(self) -> None:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        if stream != self._stream:
            library, handle = self._library, self._handle
            set_stream = library.cublasSetStream_v2(handle, ctypes.c_void_p(stream))
            check(set_stream, "cublasSetStream_v2")  # this resets the workspace
            size = ctypes.c_size_t(WORKSPACE_BYTES)
            status = library.cublasSetWorkspace_v2(handle, pointer(self._workspace), size)
            check(status, "cublasSetWorkspace_v2")
            self._stream = stream

    def multiply(
        self, layout: ProtocolLayout, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Starts ``out = a @ b`` in fp16 with fp32 sums, by the algorithm that cuBLAS chooses."""
        self._use_current_stream()
        check(gemm(self._library, self._handle, layout, a, b, out), "cublasGemmEx")


def gemm(
    library: ctypes.CDLL,
    handle: ctypes.c_void_p,
    layout: ProtocolLayout,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
) -> int:
    """Calls cublasGemmEx for ``out = a @ b``; returns its status."""
    (m, k), n = a.shape, b.shape[1]
    status: int = library.cublasGemmEx(
        handle,
        layout.b_operation,
        CUBLAS_OP_N,
        n,
        m,
        k,
        ctypes.byref(ONE),
        pointer(b),
        CUDA_R_16F,
        layout.b_leading(n, k),
        pointer(a),
        CUDA_R_16F,
        k,
        ctypes.byref(ZERO),
        pointer(out),
        CUDA_R_16F,
        n,
        CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT,
    )
    return status
