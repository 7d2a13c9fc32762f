"""Grouped GEMMs for MoE experts: each group's rows multiply their own matrix."""

# ruff: noqa: D102 - `Family` documents the methods

from __future__ import annotations

from typing import Any

from nvgemm_runtime.gemm.problem import Layout, Op, Signature
from nvgemm_runtime.gemm.roles import Role

from ...targets import BuildTarget
from ..other_provider import other_provider
from .epilogue_source import other_provider_hint
from .family import Family
from .samples import sample_operands, sample_tensors
from .toolchain import import_operators


class Grouped(Family):
    """Blackwell grouped GEMMs with consecutive groups along m."""

    operators = ("ContiguousOffset2D3DGemmDenseOperator",)

    def serves(self, signature: Signature) -> bool:
        is_plain = (signature.epilogue, signature.scales) == (None, None)
        return signature.op is Op.GROUPED_MM and is_plain and signature.layout is Layout.TN

    def parameters(self, signature: Signature) -> tuple[str, ...]:
        return ("a", "b", "out", "offsets", "stream")

    def arguments(self, signature: Signature) -> Any:
        tensors = sample_tensors(signature)
        return import_operators().IndexPtrGroupedGemmArguments(
            **sample_operands(signature, tensors),
            offsets=tensors[Role.OFFSETS],
            offsets_along="m",
        )

    def absence(self, signature: Signature, target: BuildTarget) -> str:
        arch = target.target.arch
        hint = other_provider_hint(other_provider(signature, arch))
        return f"{arch} has no grouped operator{hint}"
