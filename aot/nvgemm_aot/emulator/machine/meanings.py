"""Kinds of meaning an instruction can have: a computation, a step, or a branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .hierarchy import Warp
from .lanes import Mask

RETRY, YIELD, PARK = "retry", "yield", "park"
"""Signals: run the instruction again later; let others run; wait until woken."""

Step: TypeAlias = Callable[[Warp, Mask], "str | None"]
"""Changes a warp's lanes; returns a signal, or None to go on."""

Value: TypeAlias = Callable[[Warp], Any]
"""Returns the values of a warp's 32 lanes."""


@dataclass(frozen=True)
class Branch:
    """A jump, or, without a target, the lanes' end."""

    target: int | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """An operand: the lanes of a register, of a constant, or what a function of the warp returns.

    Attributes:
        register: Number of the register, or None.
        lanes: The constant, or None.
        value: The function, or None.
        view: numpy type by which the lanes of a register are read, or None for its own.
        narrow: numpy type to which a wider register is cut first, or None.
    """

    register: int | None = None
    lanes: Any = None
    value: Value | None = None
    view: Any = None
    narrow: Any = None


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Results that depend on nothing but a warp's own values; never waits.

    Attributes:
        function: Takes the sources' lanes; returns the result's, or a tuple if there are several.
        sources: Operands.
        results: Registers that take the results; None for one that is not wanted.
        view: numpy type by which results are stored, or None if the function returns that.
        pairs: True if the result is of ``b128``: two words a lane.
    """

    function: Callable[..., Any]
    sources: tuple[Source, ...]
    results: tuple[int | None, ...]
    view: Any = None
    pairs: bool = False


Meaning: TypeAlias = "Step | Branch | Computation"

Meanings: TypeAlias = "Sequence[tuple[Meaning, int | None, bool]]"
"""For each instruction its meaning and its predicate: register and whether negated."""


def lanes_of(source: Source) -> Value:
    """Returns the function that reads a source's lanes."""
    if source.value is not None:
        return source.value
    if source.register is None:
        lanes = source.lanes
        return lambda warp: lanes
    number, view, narrow = source.register, source.view, source.narrow
    if narrow is not None:
        if view is not None:
            return lambda warp: warp.registers[number].astype(narrow).view(view)
        return lambda warp: warp.registers[number].astype(narrow)
    if view is not None:
        return lambda warp: warp.registers[number].view(view)
    return lambda warp: warp.registers[number]


def going_on(step: Callable[[Warp, Mask], None]) -> Step:
    """Declares that a step never waits, so that it can be joined with those behind it."""
    step.never_waits = True  # type: ignore[attr-defined]
    return step
