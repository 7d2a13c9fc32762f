"""Operands for kernels under test, and what their results must be."""

from __future__ import annotations

import math

import torch

from nvgemm_runtime.format import Kernel
from nvgemm_runtime.operands import torch_dtype
from nvgemm_runtime.problem import DType, Op, Signature

EXACT_LIMIT = {
    DType.FP32: 2**24,
    DType.FP16: 2048,
    DType.BF16: 256,
    DType.FP8_E4M3: 16,
    DType.FP8_E5M2: 8,
    DType.INT32: 2**31,
    DType.INT8: 128,
}
"""By output type: whole numbers up to here have an exact value (2 to the mantissa's bits)."""

RELATIVE_ERROR = {
    DType.FP32: 1e-5,
    DType.FP16: 6e-4,
    DType.BF16: 4e-3,
    DType.FP8_E4M3: 0.04,
    DType.FP8_E5M2: 0.08,
    DType.INT32: 0.0,
    DType.INT8: 0.0,
}
"""By output type: bound on the norm of the error over the norm of the result. A rounding to the
output type costs 2**-9 (bf16), 2**-12 (fp16), 2**-5 (e4m3) or 2**-4 (e5m2) on average; the rest is
room for summation order, and for values of fp8 that are nearly zero."""

FP8_SUM_ERROR = 2**-11
"""Hopper's tensor cores sum fp8 products in about 14 bits (arXiv 2412.19437, section 3.3.2); errors
of 2e-4 were seen on an H200."""

Sizes = tuple[int, int, int, int]


def alignment_elements(kernel: Kernel, dtype: DType) -> int:
    return max(1, kernel.alignment_bytes // (dtype.bits // 8))


def sizes(kernel: Kernel) -> list[Sizes]:
    """(batch, m, n, k): odd m where it is free, n and k at the edges of the alignment."""
    signature = kernel.signature
    step = alignment_elements(kernel, signature.a)
    step_n = math.lcm(
        alignment_elements(kernel, signature.out), alignment_elements(kernel, signature.b)
    )
    batch = 3 if signature.op is Op.BMM else 1
    free_m = signature.layout.a_row_major
    m = (lambda value: value) if free_m else (lambda value: -(-value // step) * step)
    return [
        (batch, m(1), step_n, step),
        (batch, m(37), 3 * step_n, 5 * step),
        (batch, m(1003), 128 + step_n, 256 - step),
        (batch, m(128), 256, 512),
        (1, m(300), 1024 + step_n, 192 + step),
    ]


def matrix(
    rows: int, columns: int, batch: int, op: Op, row_major: bool, values: torch.Tensor
) -> torch.Tensor:
    lead = (batch,) if op is Op.BMM else ()
    shape = (*lead, rows, columns) if row_major else (*lead, columns, rows)
    tensor = values.view(shape)
    return tensor if row_major else tensor.mT


def binary(count: int, dtype: DType, density: float, device: str) -> torch.Tensor:
    return (torch.rand(count, device=device) < density).to(torch_dtype(dtype))


def spread(count: int, dtype: DType, density: float, device: str) -> torch.Tensor:
    """Values of both signs; whole numbers are as sparse as ``density``, so that sums stay small."""
    if dtype.is_integer:
        signs = torch.randint(0, 2, (count,), device=device) * 2 - 1
        return binary(count, dtype, density, device) * signs.to(torch_dtype(dtype))
    return torch.randn(count, device=device).to(torch_dtype(dtype))


def operands(
    signature: Signature, size: Sizes, *, exact: bool, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and a poisoned output. Exact ones hold 0 and 1, few enough for every sum to be exact."""
    batch, m, n, k = size if signature.op is Op.BMM else (1, *size[1:])
    density = min(0.5, math.sqrt(EXACT_LIMIT[signature.out] / (4 * k)))

    def fill(count: int, dtype: DType) -> torch.Tensor:
        values = binary if exact else spread
        return values(count, dtype, density, device)

    layout = signature.layout
    a = matrix(m, k, batch, signature.op, layout.a_row_major, fill(batch * m * k, signature.a))
    b = matrix(k, n, batch, signature.op, layout.b_row_major, fill(batch * k * n, signature.b))
    lead = (batch,) if signature.op is Op.BMM else ()
    return a, b, poisoned((*lead, m, n), signature.out, device)


def poisoned(shape: tuple[int, ...], dtype: DType, device: str = "cuda") -> torch.Tensor:
    """An output in which every byte is 0xFF: NaN, or -1."""
    out = torch.empty(shape, dtype=torch_dtype(dtype), device=device)
    out.view(torch.uint8).fill_(0xFF)
    return out


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def assert_exact(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal to the reference; the few sums beyond the exact values round as torch rounds."""
    wanted = reference(a, b).to(out.dtype).double()
    assert torch.equal(out.double(), wanted), f"{(out.double() != wanted).sum()} elements differ"


def assert_close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, signature: Signature) -> None:
    wanted = reference(a, b)
    error = torch.linalg.vector_norm(out.double() - wanted) / torch.linalg.vector_norm(wanted)
    bound = RELATIVE_ERROR[signature.out]
    if signature.a in (DType.FP8_E4M3, DType.FP8_E5M2):
        bound = max(bound, FP8_SUM_ERROR)
    assert float(error) <= bound, f"relative error {float(error):.2e}, at most {bound:.0e}"
