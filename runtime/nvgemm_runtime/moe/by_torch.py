"""Computes experts' grouped GEMMs and row sums by torch if no prebuilt kernel serves."""

from __future__ import annotations

import torch

from .operators import dense_like, multiplies_into_fp32, rounded, widen

ALIGNMENT_BYTES = 16
"""Alignment of rows and pointers that ``torch._grouped_mm`` requires, from its error message."""

_TORCH_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Operand dtypes that ``torch._grouped_mm`` supports, from its error message."""


def rows_by_torch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Computes `nvgemm_runtime.moe.products.rows` without a bias."""
    if not _torch_can_group(a):
        out = a.new_zeros((a.shape[0], b.shape[2]))
        for group, (start, end) in enumerate(_spans(offsets)):
            out[start:end] = a[start:end] @ b[group]
        return out
    n = b.shape[2]
    b = _aligned(b) if b.stride(-1) == 1 else _aligned(b.mT).mT
    a = _aligned(a)
    if a.shape[1] != b.shape[1]:  # only one operand was padded along k
        k = max(a.shape[1], b.shape[1])
        a = torch.nn.functional.pad(a, (0, k - a.shape[1]))
        b = _padded_rows(b, k)
    return torch._grouped_mm(a, b, offs=offsets)[:, :n].contiguous()


def columns_by_torch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Computes `nvgemm_runtime.moe.products.columns`."""
    if not _torch_can_group(a):
        out = a.new_zeros((offsets.shape[0], a.shape[1], b.shape[1]))
        for group, (start, end) in enumerate(_spans(offsets)):
            out[group] = a[start:end].t() @ b[start:end]
        return out
    p, q = a.shape[1], b.shape[1]
    a, b = _aligned(a), _aligned(b)
    return torch._grouped_mm(a.t(), b, offs=offsets)[:, :p, :q].contiguous()


def gathered_by_torch(
    matrix: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Computes `nvgemm_runtime.moe.row_sums.gathered_rows` from a copy of all rows.

    ``embedding_bag`` would do this, but requires weights in the matrix's dtype.
    """
    if rows is None:
        assert weights is not None
        return _weighted(matrix, weights, dense_like(matrix))
    inside = (rows >= 0) & (rows < matrix.shape[0])
    indices = torch.where(inside, rows, 0)
    gathered = matrix.index_select(0, indices.reshape(-1)).reshape(*rows.shape, matrix.shape[1])
    gathered = torch.where(inside[..., None], gathered, 0)
    if weights is None:
        # Torch adds 16-bit values in fp32. Under CUDA's autocast the sum's dtype is fp32.
        return rounded(gathered.sum(1), matrix.dtype)
    weights = torch.where(inside, weights, 0)
    if weights.shape[1] == 1:
        single = gathered.squeeze(1)
        return _weighted(single, weights, single)
    if not multiplies_into_fp32(matrix):
        return rounded((widen(gathered) * weights.unsqueeze(2)).sum(1), matrix.dtype)
    # Torch multiplies 16 bits with 16 bits. A second product adds the weights' remaining bits.
    near = weights.to(matrix.dtype)
    sums = torch.bmm(near.unsqueeze(1), gathered, out_dtype=torch.float32)
    if weights.dtype is not matrix.dtype:
        rest = torch.where(near.isfinite(), weights - near, 0).to(matrix.dtype)
        sums += torch.bmm(rest.unsqueeze(1), gathered, out_dtype=torch.float32)
    return sums.squeeze(1).to(matrix.dtype)


def _weighted(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiplies rows by their weights [rows, 1] in one operator, without an fp32 matrix."""
    product: torch.Tensor = torch.mul(rows, widen(weights), out=out)
    return product


def _torch_can_group(a: torch.Tensor) -> bool:
    """Returns True if ``torch._grouped_mm`` runs on the device. On the CPU a loop costs no more."""
    if a.device.type != "cuda" or a.dtype not in _TORCH_TYPES:
        return False
    return bool(torch.cuda.get_device_capability(a.device) >= (8, 0))


def _spans(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Returns each group's first row and end. Waits for the device."""
    ends = offsets.tolist()
    return list(zip([0, *ends], ends))


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a row-major matrix aligned for ``torch._grouped_mm``, zero-padded if needed."""
    unit = ALIGNMENT_BYTES // matrix.element_size()
    padding = -matrix.shape[-1] % unit
    if padding:
        return torch.nn.functional.pad(matrix, (0, padding))
    starts = matrix.data_ptr() % ALIGNMENT_BYTES == 0
    if starts and all(step % unit == 0 for step in matrix.stride()[:-1]) and matrix.stride(-1) == 1:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _padded_rows(b: torch.Tensor, k: int) -> torch.Tensor:
    return torch.nn.functional.pad(b, (0, 0, 0, k - b.shape[1]))
