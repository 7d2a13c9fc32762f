"""What the provider knows of operators that are listed, called and designed alike."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import Signature

from ...targets import BuildTarget
from ..base import BlockShape


class Family(abc.ABC):
    """Operators that are listed, called and designed alike; one module beside this one each.

    Attributes:
        operators: Names of the classes of ``cutlass.operators`` that it is made of.
    """

    operators: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def serves(self, signature: Signature) -> bool:
        """Whether signatures such as this are computed by its operators."""

    @abc.abstractmethod
    def parameters(self, signature: Signature) -> tuple[str, ...]:
        """What its kernels take, as `nvgemm_runtime.bundle.calling_convention` spells it."""

    @abc.abstractmethod
    def arguments(self, signature: Signature) -> Any:
        """Sample arguments, as ``cutlass.operators`` wants them; called in FakeTensorMode."""

    @abc.abstractmethod
    def absence(self, signature: Signature, target: BuildTarget) -> str:
        """Why there is no operator, where the library lists none of the family's."""

    def compile(self, operator: Any, arguments: Any, target_sm: str) -> Any:
        """Compile one of its operators; raises whatever the compiler raises."""
        return operator.compile(arguments, target_sm=target_sm)

    def unfit(self, operator: Any, signature: Signature) -> str | None:
        """Why one of its operators is no candidate although the library lists it, or None."""
        return None

    def stranger(self, kind: str) -> str:
        """Why an operator of a class that is not the family's, and is listed as well, is none."""
        return f"this provider does not know how operators of class {kind} are called"

    def added_code(self, signature: Signature) -> str:
        """What kernels are compiled from besides the operator's own code; see `Candidate`."""
        return ""

    def design(self, metadata: Any) -> KernelDesign:
        """How an operator works."""
        design = metadata.design
        tile_m, tile_n, tile_k = design.tile_shape
        return KernelDesign(
            tile=(tile_m, tile_n, tile_k),
            ctas_per_tile=2 if getattr(design, "use_2cta_mma", False) else 1,
            cluster=(design.cluster_shape[0], design.cluster_shape[1]),
            fallback_cluster=None,
            scheduler="static_persistent",
        )

    def block_shape(self, metadata: Any, design: KernelDesign) -> BlockShape:
        """What the runtime model needs to know of an operator of this design."""
        tile_m, tile_n, tile_k = design.tile
        return BlockShape(
            tile=(tile_m // design.ctas_per_tile, tile_n, tile_k), cluster=design.cluster
        )
