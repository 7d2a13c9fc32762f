"""Computes group starts for quack's library from torch's group ends."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def begins_of_groups() -> Any:
    """Returns a class that presents group ends and an extent as the library's vector of starts.

    A start is clamped to between 0 and the extent that groups divide: A's rows, or its k.
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
        """Group starts followed by the last group's end, as the library reads them."""

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
