"""quack's kernel classes, one row per kind of tensor-core instruction.

`family_of` finds an architecture's row. Modules of this package read its columns, or key a table of
designs by it; none compares architectures.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import ORDERED_ARCHITECTURES, architecture
from nvgemm_runtime.gemm.types import Mma

from ..base import CLC, STATIC_PERSISTENT


@dataclass(frozen=True, kw_only=True)
class MmaFamily:
    """Facts about quack's kernels for one kind of tensor-core instruction.

    Attributes:
        mma: Instruction.
        name: Suffix in class names, e.g. ``Sm90`` in ``GemmSm90``.
        scheduler: Scheduler, unless a design has a dynamic schedule.
        has_pingpong: True if two warp groups may compute a tile each.
        has_cta_pairs: True if two thread blocks may issue one instruction.
        registers_hold_sums: True if accumulators take registers, so that large tiles spill.
        gathers_after_wait: True if kernels that gather rows wait for the previous kernel on the
            stream before they load row indices.
    """

    mma: Mma
    name: str
    scheduler: str
    has_pingpong: bool
    has_cta_pairs: bool
    registers_hold_sums: bool
    gathers_after_wait: bool

    @property
    def takes_clusters(self) -> bool:
        """True if a launch passes the number of concurrent clusters, for a static schedule."""
        return self.scheduler == STATIC_PERSISTENT

    def gemm(self) -> Any:
        """Imports the library's GEMM without an epilogue."""
        module = importlib.import_module(f"quack.gemm_{self.name.lower()}")
        return getattr(module, f"Gemm{self.name}")

    def gemm_with_default_epilogue(self) -> Any:
        """Imports the library's GEMM with its own epilogue."""
        module = importlib.import_module("quack.gemm_default_epi")
        return getattr(module, f"GemmDefault{self.name}")


SM90 = MmaFamily(
    mma=Mma.WGMMA,
    name="Sm90",
    scheduler=STATIC_PERSISTENT,
    has_pingpong=True,
    has_cta_pairs=False,
    registers_hold_sums=True,
    gathers_after_wait=True,
)

SM100 = MmaFamily(
    mma=Mma.TCGEN05,
    name="Sm100",
    scheduler=CLC,
    has_pingpong=False,
    has_cta_pairs=True,
    registers_hold_sums=False,
    gathers_after_wait=False,
)

FAMILIES = {family.mma: family for family in (SM90, SM100)}
"""All families. A new one also needs designs in `designs`."""


@functools.cache
def served_architectures() -> tuple[str, ...]:
    """Returns the architectures that have a family."""
    return tuple(arch for arch in ORDERED_ARCHITECTURES if architecture(arch).mma in FAMILIES)


@functools.cache
def family_of(arch: str) -> MmaFamily:
    """Returns an architecture's family.

    Raises:
        TargetError: If it has none; the message lists architectures that do.
    """
    served = served_architectures()
    if arch not in served:
        raise TargetError(f"quack has no kernels for {arch!r} (known: {', '.join(served)})")
    return FAMILIES[architecture(arch).mma]
