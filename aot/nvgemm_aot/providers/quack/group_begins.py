"""Where groups begin, as quack's library reads it, from where they end, as torch says it."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def begins_of_groups() -> Any:
    """A class that stands for the library's vector of beginnings, made of ends and an extent.

    A beginning is cut to 0 and to the extent that is divided into groups: the rows of A, or its k.
    """
    import cutlass
    from cutlass import Int32, cute

    @cute.jit  # type: ignore[untyped-decorator]
    def begin_of(ends: cute.Tensor, extent: Int32, group: Int32) -> Int32:
        begin = Int32(0)
        if group > 0:
            begin = cutlass.min(cutlass.max(ends[group - 1], Int32(0)), extent)
        return begin

    class Begins:
        """Where groups begin, and behind them where the last one ends, as the library reads it."""

        def __init__(self, ends: Any, extent: Any) -> None:
            self._ends, self._extent = ends, extent

        @property
        def shape(self) -> tuple[Any]:
            return (self._ends.shape[0] + 1,)

        def __getitem__(self, group: Any) -> Any:
            return begin_of(self._ends, self._extent, Int32(group))

        def __extract_mlir_values__(self) -> list[Any]:
            ends = cutlass.extract_mlir_values(self._ends)
            self._of_ends = len(ends)
            return [*ends, *cutlass.extract_mlir_values(self._extent)]

        def __new_from_mlir_values__(self, values: list[Any]) -> Any:
            return Begins(
                cutlass.new_from_mlir_values(self._ends, values[: self._of_ends]),
                cutlass.new_from_mlir_values(self._extent, values[self._of_ends :]),
            )

    return Begins
