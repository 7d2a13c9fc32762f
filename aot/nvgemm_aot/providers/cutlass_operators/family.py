"""Base class for operator families."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import Signature

from ...targets import BuildTarget
from ..base import ONE_TILE, STATIC_PERSISTENT, BlockShape


class Family(abc.ABC):
    """Operators that share listing, call and design. Each family has its own module.

    ``operators`` names the family's classes in ``cutlass.operators``.
    """

    operators: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def serves(self, signature: Signature) -> bool:
        """Returns True if the family's operators compute such signatures."""

    @abc.abstractmethod
    def parameters(self, signature: Signature) -> tuple[str, ...]:
        """Returns kernel parameters, named as in `nvgemm_runtime.bundle.calling_convention`."""

    @abc.abstractmethod
    def arguments(self, signature: Signature) -> Any:
        """Builds sample arguments for ``cutlass.operators``. Runs in FakeTensorMode."""

    @abc.abstractmethod
    def absence(self, signature: Signature, target: BuildTarget) -> str:
        """Returns the reason if the library lists no operator from the family."""

    def compile(self, operator: Any, arguments: Any, target_sm: str) -> Any:
        """Compiles an operator; may raise any compiler exception."""
        return operator.compile(arguments, target_sm=target_sm)

    def unfit_reason(self, operator: Any, signature: Signature) -> str | None:
        """Returns the reason if a listed operator is no candidate, else None."""
        return None

    def unknown_class_reason(self, kind: str) -> str:
        """Returns the reason to reject an operator whose class is not in the family."""
        return f"this provider does not know how operators of class {kind} are called"

    def added_code(self, operator: Any, signature: Signature) -> str:
        """Returns code that is compiled besides the operator's own; see `Candidate`."""
        return ""

    def design(self, metadata: Any) -> KernelDesign:
        """Reads an operator's design from its metadata."""
        design = metadata.design
        tile_m, tile_n, tile_k = design.tile_shape
        return KernelDesign(
            tile=(tile_m, tile_n, tile_k),
            ctas_per_tile=2 if getattr(design, "use_2cta_mma", False) else 1,
            cluster=(design.cluster_shape[0], design.cluster_shape[1]),
            fallback_cluster=None,
            scheduler=STATIC_PERSISTENT,
        )

    def block_shape(self, metadata: Any, design: KernelDesign) -> BlockShape:
        """Returns the runtime model's facts about an operator with this design."""
        tile_m, tile_n, tile_k = metadata.design.tile_shape
        return BlockShape(
            tile=(tile_m // design.ctas_per_tile, tile_n, tile_k),
            cluster=design.cluster,
            swapped=design.scheduler == ONE_TILE,
        )
