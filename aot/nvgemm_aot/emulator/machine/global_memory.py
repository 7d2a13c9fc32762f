"""Global memory: the tensors that a kernel was given, and nothing around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..emulation_errors import MemoryAccessError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Region:
    """One tensor's memory.

    Attributes:
        address: Address of its first byte.
        data: Its bytes.
        name: Name in messages.
        writable: True if the kernel may write it.
        is_workspace: True if blocks exchange data in it.
        is_early: True if its data are complete before a dependent launch may begin.
    """

    address: int
    data: Bytes
    name: str
    writable: bool = True
    is_workspace: bool = False
    is_early: bool = False

    @property
    def end(self) -> int:
        """Address behind its last byte."""
        return self.address + len(self.data)


class GlobalMemory:
    """Regions that do not overlap. An access that does not lie within one is an error."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = sorted(regions, key=lambda region: region.address)
        for before, after in zip(self.regions, self.regions[1:]):
            if before.end > after.address:
                raise MemoryAccessError(f"{before.name} and {after.name} overlap in memory")
        self._last = self.regions[0] if self.regions else None

    def holding(self, first: int, last: int) -> Region | None:
        """Returns the region that holds the bytes from ``first`` to ``last``, or None."""
        found = self._last
        if found is None or not found.address <= first <= last < found.end:
            found = next((each for each in self.regions if each.address <= first < each.end), None)
            if found is None or last >= found.end:
                return None
            self._last = found
        return found

    def find(self, first: int, last: int, *, writes: bool = False) -> Region:
        """Returns the region that holds the bytes from address ``first`` to ``last``.

        Raises:
            MemoryAccessError: If none does, or it must not be written.
        """
        found = self.holding(first, last)
        if found is None:
            raise MemoryAccessError(self._outside(first, last, writes))
        if writes and not found.writable:
            raise MemoryAccessError(f"writes {found.name}, which must only be read")
        return found

    def _outside(self, first: int, last: int, writes: bool) -> str:
        regions = ", ".join(
            f"{region.name} at {region.address:#x} ({len(region.data)} bytes)"
            for region in self.regions
        )
        verb = "writes" if writes else "reads"
        return f"{verb} {first:#x} to {last:#x}, which no tensor holds: {regions}"
