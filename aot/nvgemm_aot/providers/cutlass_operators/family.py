"""The base class of families: operators that are listed, called and designed in the same way."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import Signature

from ...targets import BuildTarget
from ..base import ONE_TILE, STATIC_PERSISTENT, BlockShape


class Family(abc.ABC):
    """Operators that are listed, called and designed in the same way; each family has a module.

    ``operators`` names the classes of ``cutlass.operators`` that belong to it.
    """

    operators: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def serves(self, signature: Signature) -> bool:
        """Whether signatures such as this are computed by its operators."""

    @abc.abstractmethod
    def parameters(self, signature: Signature) -> tuple[str, ...]:
        """Parameters of its kernels, named as in `nvgemm_runtime.bundle.calling_convention`."""

    @abc.abstractmethod
    def arguments(self, signature: Signature) -> Any:
        """Sample arguments, as ``cutlass.operators`` wants them; called in FakeTensorMode."""

    @abc.abstractmethod
    def absence(self, signature: Signature, target: BuildTarget) -> str:
        """Say why there is no operator, if the library lists none of the family."""

    def compile(self, operator: Any, arguments: Any, target_sm: str) -> Any:
        """Compile one of its operators; may raise any exception of the compiler."""
        return operator.compile(arguments, target_sm=target_sm)

    def why_unfit(self, operator: Any, signature: Signature) -> str | None:
        """Say why one of its operators is no candidate although it is listed, or return None."""
        return None

    def why_unknown(self, kind: str) -> str:
        """Say why a listed operator of a class that is not the family's is no candidate."""
        return f"this provider does not know how operators of class {kind} are called"

    def added_code(self, signature: Signature) -> str:
        """The code that is compiled besides the operator's own; see `Candidate`."""
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
            scheduler=STATIC_PERSISTENT,
        )

    def block_shape(self, metadata: Any, design: KernelDesign) -> BlockShape:
        """What the runtime model needs to know of an operator of this design."""
        tile_m, tile_n, tile_k = metadata.design.tile_shape
        return BlockShape(
            tile=(tile_m // design.ctas_per_tile, tile_n, tile_k),
            cluster=design.cluster,
            swapped=design.scheduler == ONE_TILE,
        )
