"""Block-scaled GEMMs: operands have a scale for each block of 16 or 32 values along k."""

# ruff: noqa: D102 - `Family` documents the methods

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role

from ...targets import BuildTarget
from .family import Family
from .samples import sample_tensors, torch_type
from .toolchain import import_operators

_PAIRED_TILE_M = 256
"""Tile m from which pairs of thread blocks compute a tile, whatever the operator's name says.
Source: ``PersistentDenseBlockScaledGemmKernel.__init__`` in cutlass.operators 0.3.0."""


class BlockScaled(Family):
    """MXFP8, MXFP4 and NVFP4 GEMMs on Blackwell."""

    operators = ("PersistentDenseBlockScaledGemmOperator",)

    def serves(self, signature: Signature) -> bool:
        scales = signature.scales
        return signature.op is Op.MM and scales is not None and scales.is_swizzled

    def parameters(self, signature: Signature) -> tuple[str, ...]:
        return ("a*", "b*", "scale_a*", "scale_b*", "out*", "mnkl", "stream")

    def arguments(self, signature: Signature) -> Any:
        operators = import_operators()
        assert signature.scales is not None
        mode = getattr(operators.ScaleMode, f"Blockwise1x{signature.scales.block}")
        swizzle = operators.ScaleSwizzleMode.Swizzle32x4x4
        tensors = sample_tensors(signature)

        def scaled(operand: Role, scale: Role) -> Any:
            return operators.ScaledOperand(tensors[operand], tensors[scale], mode, swizzle)

        return operators.GemmArguments(
            A=scaled(Role.A, Role.SCALE_A),
            B=scaled(Role.B, Role.SCALE_B),
            out=tensors[Role.OUT],
            accumulator_type=torch_type(signature.accumulator),
        )

    def absence(self, signature: Signature, target: BuildTarget) -> str:
        return f"{target.target.arch} has no block-scaled operator"

    def design(self, metadata: Any) -> KernelDesign:
        design = super().design(metadata)
        return replace(design, ctas_per_tile=2 if design.tile[0] == _PAIRED_TILE_M else 1)
