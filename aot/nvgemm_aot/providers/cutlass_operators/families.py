"""All families of operators: the one place to name a new one."""

from __future__ import annotations

from nvgemm_runtime.gemm.problem import Signature

from .block_scaled import BlockScaled
from .dense import Dense
from .epilogue import WithEpilogue
from .family import Family
from .grouped import Grouped

FAMILIES: tuple[Family, ...] = (Dense(), WithEpilogue(), BlockScaled(), Grouped())


def family_of(signature: Signature) -> Family | None:
    """The family that computes signatures such as this; None where there is none."""
    return next((family for family in FAMILIES if family.serves(signature)), None)
