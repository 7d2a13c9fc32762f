"""Joins instructions between branches into Python functions, which run them without a loop."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import numpy as np

from .lanes import ALL_BYTES, FULL, NO_BYTES, Mask, chosen, same
from .meanings import Branch, Computation, Meaning, Meanings, Source

Function: TypeAlias = Callable[..., Any]

LONGEST = 256
"""Instructions of a run, at most, since Python compiles very long functions slowly."""


@dataclass(frozen=True)
class Run:
    """Instructions from ``begin`` to before ``end``, of which only the last may wait."""

    meanings: Meanings
    begin: int
    end: int

    @functools.cached_property
    def all_lanes(self) -> Function:
        """Runs them with all lanes of a warp; takes the warp and `FULL`. Returns a signal."""
        return _Source(self.meanings, self.begin, self.end, all_lanes=True).function()

    @functools.cached_property
    def some_lanes(self) -> Function:
        """Runs them with some lanes; takes the warp and their mask. Returns a signal."""
        return _Source(self.meanings, self.begin, self.end, all_lanes=False).function()


def joined(meanings: Meanings, begin: int, stops: frozenset[int]) -> Run:
    """Returns the run that begins at an instruction, which must not be a branch.

    It ends before a branch, or before one of ``stops``, or behind a step that may wait.
    """
    end = begin
    while True:
        meaning = meanings[end][0]
        end += 1
        if not isinstance(meaning, Computation) and not never_waits(meaning):
            break
        if end in stops or end == len(meanings) or end - begin >= LONGEST:
            break
        if isinstance(meanings[end][0], Branch):
            break
    return Run(meanings, begin, end)


def never_waits(meaning: Meaning) -> bool:
    """Returns whether a step was declared to return no signal."""
    return getattr(meaning, "never_waits", False)


def failing_instruction(error: BaseException, run: Run) -> int:
    """Returns the instruction of a run at which an error was raised."""
    trace = error.__traceback__
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return run.begin + max(line - _FIRST_LINE, 0)


def running_instruction(warp: Any) -> int:
    """Returns the instruction that a warp runs, for functions that its meaning calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _NAME:
        frame = frame.f_back
    begin: int = warp.stack[-1][0]
    return begin if frame is None else begin + frame.f_lineno - _FIRST_LINE


_OPERATORS: dict[Function, str] = {
    np.add: "+",
    np.subtract: "-",
    np.multiply: "*",
    np.bitwise_and: "&",
    np.bitwise_or: "|",
    np.bitwise_xor: "^",
    np.left_shift: "<<",
    np.right_shift: ">>",
    np.equal: "==",
    np.not_equal: "!=",
    np.less: "<",
    np.less_equal: "<=",
    np.greater: ">",
    np.greater_equal: ">=",
}
"""Functions of two arrays that Python calls faster by their operators."""

_NAME = "<joined instructions>"
_FIRST_LINE = 2


@dataclass
class _Source:
    """Writes the Python text of a run, one line for each instruction."""

    meanings: Meanings
    begin: int
    end: int
    all_lanes: bool
    names: dict[str, Any] = field(default_factory=lambda: {"chosen": chosen})

    def function(self) -> Function:
        lines = ["def run(warp, mask, FULL, r):"]
        for place in range(self.begin, self.end):
            last = place == self.end - 1
            lines.append(" " + self._line(place, last))
        text = "\n".join(lines)
        exec(compile(text, _NAME, "exec"), self.names)
        return self.names["run"]  # type: ignore[no-any-return]

    def _named(self, value: Any) -> str:
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def _line(self, place: int, last: bool) -> str:
        meaning, predicate, negated = self.meanings[place]
        assert not isinstance(meaning, Branch)
        if isinstance(meaning, Computation):
            return self._computation(meaning, predicate, negated)
        step = self._named(meaning)
        back = "return " if last else ""
        if predicate is None:
            return f"{back}{step}(warp, mask)"
        active = self._named(_step_where)
        return f"{back}{active}({step}, warp, mask, r[{predicate}], {negated})"

    def _computation(self, meaning: Computation, predicate: int | None, negated: bool) -> str:
        result = self._result(meaning.function, [*map(self._source, meaning.sources)])
        condition = None if self.all_lanes else "mask"
        if predicate is not None:
            holds = f"{'~' if negated else ''}r[{predicate}]"
            condition = holds if condition is None else f"mask & {holds}"
        if len(meaning.results) == 1:
            (number,) = meaning.results
            view = self._view(meaning.view)
            if number is None:
                return result
            if meaning.pairs and condition is not None:
                condition = f"({condition})[:, None]"
            return f"r[{number}] = {self._kept(f'{result}{view}', number, condition)}"
        view = self._view(meaning.view)
        parts = [f"t = {result}"]
        if condition is not None:
            parts.append(f"m = {condition}")
        for place, number in enumerate(meaning.results):
            if number is not None:
                kept = self._kept(f"t[{place}]{view}", number, condition and "m")
                parts.append(f"r[{number}] = {kept}")
        return "; ".join(parts)

    def _result(self, function: Function, inputs: list[str]) -> str:
        if function is same:
            return inputs[0]
        if function in _OPERATORS and len(inputs) == 2:
            return f"({inputs[0]} {_OPERATORS[function]} {inputs[1]})"
        return f"{self._named(function)}({', '.join(inputs)})"

    def _kept(self, value: str, number: int, condition: str | None) -> str:
        return value if condition is None else f"chosen({condition}, {value}, r[{number}])"

    def _view(self, view: Any) -> str:
        return "" if view is None else f".view({self._named(view)})"

    def _source(self, source: Source) -> str:
        if source.value is not None:
            return f"{self._named(source.value)}(warp)"
        if source.register is None:
            return self._named(source.lanes)
        narrow = "" if source.narrow is None else f".astype({self._named(source.narrow)})"
        return f"r[{source.register}]{narrow}{self._view(source.view)}"


def _step_where(step: Any, warp: Any, mask: Mask, predicate: Mask, negated: bool) -> Any:
    """Runs a step in the lanes of a mask in which its predicate holds, if there are any."""
    active = mask & ~predicate if negated else mask & predicate
    key = active.tobytes()
    if key == NO_BYTES:
        return None
    return step(warp, FULL if key == ALL_BYTES else active)
