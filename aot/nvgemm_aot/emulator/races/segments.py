"""Sets of what has happened before, as warps and asynchronous operations know it.

A segment is an asynchronous operation, or a stretch of a warp's accesses between two points at
which others can learn of them. A set of segments is an integer with a bit for each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SegmentSet = int


class Knowledge(NamedTuple):
    """Segments that are ordered before a point of the execution.

    Attributes:
        generic: Segments that happened before.
        asynchronous: Those among them whose generic writes asynchronous operations see (PTX ISA,
            "Causality order": a proxy fence lies on the path).
        barriers: Segments whose memory barriers are initialised for everybody in the cluster.
    """

    generic: SegmentSet = 0
    asynchronous: SegmentSet = 0
    barriers: SegmentSet = 0

    def __or__(self, other: Any) -> Knowledge:
        """Returns what either knows."""
        return Knowledge(
            self.generic | other.generic,
            self.asynchronous | other.asynchronous,
            self.barriers | other.barriers,
        )


NOTHING = Knowledge()


class WarpState:
    """A warp's segment and knowledge.

    Attributes:
        warp: The warp.
        segment: Number of the current segment.
        touched: True if the current segment has accesses.
        known: Its knowledge, without the current segment.
        published: Knowledge that a fence made ready for relaxed arrivals to pass on.
        pending: Knowledge that relaxed waits observed, for a fence to acquire.
    """

    __slots__ = ("known", "pending", "published", "segment", "touched", "warp")

    def __init__(self, warp: Any, segment: int) -> None:
        self.warp = warp
        self.segment = segment
        self.touched = False
        self.known = NOTHING
        self.published = NOTHING
        self.pending = NOTHING


class OperationState:
    """An asynchronous operation: its own segment, and what its issue came after.

    Attributes:
        warp: Warp that issued it.
        place: Index of the issuing instruction.
        opcode: Name of that instruction up to its second qualifier, such as ``tcgen05.mma``.
        segment: Number of the segment that is this operation.
        known: Knowledge of the warp that issued it.
        is_store: True of a bulk store, which belongs to a group that its thread waits for.
    """

    __slots__ = ("is_store", "known", "opcode", "place", "segment", "warp")

    def __init__(
        self,
        warp: Any,
        place: int,
        opcode: str,
        segment: int,
        known: Knowledge,
        *,
        is_store: bool,
    ) -> None:
        self.warp = warp
        self.place = place
        self.opcode = opcode
        self.segment = segment
        self.known = known
        self.is_store = is_store

    @property
    def is_pipelined(self) -> bool:
        """True of tensor-core work, which one warp's issue order keeps in order.

        PTX ISA, "tcgen05 memory consistency model", implicitly pipelined instructions.
        """
        return self.opcode in ("tcgen05.mma", "tcgen05.cp", "tcgen05.shift")
