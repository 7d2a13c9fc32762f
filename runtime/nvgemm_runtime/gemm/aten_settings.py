"""Settings of torch that change how ATen multiplies matrices, and so its times."""

from __future__ import annotations

from .element_types import DType

_USUAL = {
    "allow_fp16_accumulation": ((False,), DType.FP16),
    "allow_fp16_reduced_precision_reduction": ((True,), DType.FP16),
    "allow_fp16_reduced_precision_reduction_split_k": ((True,), DType.FP16),
    "allow_bf16_reduced_precision_reduction": ((True,), DType.BF16),
    "allow_bf16_reduced_precision_reduction_split_k": ((True,), DType.BF16),
    "fp32_precision": (("none", "ieee"), DType.FP32),
}
"""By attribute of ``torch.backends.cuda.matmul``: what it is unless it is set, and the element type
of A that it concerns (read on torch 2.13). What another torch does not have is left out. That of
fp32 is what ``set_float32_matmul_precision`` and ``allow_tf32`` set."""

_USUAL_LIBRARIES = ("Default", "Cublas")
"""Names of ``preferred_blas_library``; torch takes the former for the latter (``Context.cpp``)."""


def unusual_setting(dtype: DType) -> str | None:
    """The first setting for GEMMs of an element type that is not as usual, in words, or None."""
    import torch

    library = torch.backends.cuda.preferred_blas_library()
    if library.name not in _USUAL_LIBRARIES:
        return f"torch.backends.cuda.preferred_blas_library() is {library.name}, usually Cublas"
    for name, (usual, concerned) in _USUAL.items():
        value = getattr(torch.backends.cuda.matmul, name, usual[0])
        if concerned is dtype and value not in usual:
            return f"torch.backends.cuda.matmul.{name} is {value}, usually {usual[0]}"
    return None
