"""Recorded GEMMs that no manifest can declare, read from the words that recordings have."""

from __future__ import annotations

from dataclasses import dataclass

from nvgemm_runtime.recording.declarable import sizes_in_words
from nvgemm_runtime.recording.text import read_others


@dataclass(frozen=True)
class Sizes:
    """How large a GEMM is, whatever else it is."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """As `Problem.flops`."""
        return 2 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True, kw_only=True)
class Undeclarable:
    """A recorded GEMM that no manifest can declare, and so no bundle serve.

    Attributes:
        gemm: It, in words.
        sizes: Its sizes, or None where words do not tell them.
        count: How often it was recorded.
        reason: Why no manifest can declare it.
    """

    gemm: str
    sizes: Sizes | None
    count: int
    reason: str


def read_undeclarable(text: str) -> tuple[Undeclarable, ...]:
    """What stands in a recording beside the manifest, even in a copy that was edited.

    Any other manifest has none.
    """
    return tuple(_read(line, count) for line, count in read_others(text).items())


def _read(line: str, count: int) -> Undeclarable:
    gemm, _, reason = line.partition(": ")
    extents = sizes_in_words(gemm)
    return Undeclarable(
        gemm=gemm,
        sizes=None if extents is None else Sizes(*extents),
        count=count,
        reason=reason or "no manifest can declare it",
    )
