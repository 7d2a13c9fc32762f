"""Reads and writes rankings files; docs/reference/rankings.md is their specification.

`read_rankings` checks a whole file before it returns anything. Each error names the position, the
observed value, the allowed values, and the next step.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from nvgemm_runtime.bundle.encode import timing_json
from nvgemm_runtime.bundle.format import (
    BACK_TO_BACK,
    LEAST_REPEAT_S,
    MAGIC,
    Conditions,
    Timing,
    canonical_json,
)
from nvgemm_runtime.errors import NvgemmError, RankingsError, StorageError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installing import UPGRADE

from ..storage.files import IrregularFileError, read_start, write_atomic
from .entries import COLD, Entry, Operator, Origin, Rankings

FORMAT, VERSION = "nvgemm-aot rankings", 1

MOST_BYTES = 64 << 20
"""Largest file that is read, in bytes: a problem with 300 kernels takes about 6 KB."""

_MOST_TEXT = 1000
_MOST_NS = 2**63 - 1
_LONG_NUMBER = re.compile(rb"\d{20}")
"""Digit run that no valid integer contains. Most files have none, and skip the check of every
integer; a digest may have one."""

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Hashable)
_S = TypeVar("_S", bytes, Operator)

_EXPORT = "export it again from the bundles that were tuned: nvgemm-aot rankings export"


def write_rankings(path: Path, rankings: Rankings) -> None:
    """Writes a file, one line per problem; equal rankings give equal bytes.

    Raises:
        StorageError: If the file cannot be written.
    """
    write_atomic(path, encode(rankings))


def encode(rankings: Rankings) -> bytes:
    """Encodes rankings as a file's bytes."""
    origins = {canonical_json(entry.origin.document) for entry in rankings.entries}
    operators = {operator for entry in rankings.entries for operator, _ in entry.kernels}
    origin_places, operator_places = _places(origins), _places(operators)
    problems: dict[str, list[dict[str, Any]]] = {}
    for entry in rankings.entries:
        problems.setdefault(entry.problem.key, []).append(
            {
                "origin": origin_places[canonical_json(entry.origin.document)],
                "date": entry.origin.conditions.date,
                "kernels": [
                    [operator_places[operator], timing.time_ns, timing.spread_ns]
                    for operator, timing in entry.kernels
                ],
                "aten": timing_json(entry.aten),
                "triton": timing_json(entry.triton),
                "doubts": list(entry.doubts),
                **({} if entry.repeated is None else {"repeated": entry.repeated}),
            }
        )
    parts = {
        "format": canonical_json(FORMAT),
        "operators": _lines(
            canonical_json([one.provider, one.operator]) for one in operator_places
        ),
        "origins": _lines(origin_places),
        "problems": _lines(
            canonical_json({"problem": key, "measurements": found})
            for key, found in problems.items()
        ),
        "version": canonical_json(VERSION),
    }
    members = [canonical_json(name) + b":" + value for name, value in parts.items()]
    return b"{" + b",\n".join(members) + b"}\n"


def _places(values: Iterable[_S]) -> dict[_S, int]:
    """Maps each value to its index in sorted order."""
    return {value: place for place, value in enumerate(sorted(values))}


def _lines(values: Any) -> bytes:
    return b"[\n" + b",\n".join(values) + b"\n]"


def read_rankings(path: Path) -> Rankings:
    """Reads a file.

    Raises:
        StorageError: If the file cannot be read.
        RankingsError: If it is damaged, or is no rankings file in a known version.
    """
    try:
        data = read_start(path, MOST_BYTES + 1)
    except IrregularFileError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path}: cannot read: {error.strerror}; name a file that nvgemm-aot rankings export "
            "or merge wrote"
        ) from error
    return decode(str(path), data)


def decode(where: str, data: bytes) -> Rankings:
    """Reads a file's bytes; ``where`` names the file in messages.

    Raises:
        RankingsError: See `read_rankings`.
    """
    return RankingsFile(where, data).rankings()


class _Checker:
    """Checks values, and names the file and the position if a value is not allowed."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, place: str, what: str, todo: str = _EXPORT) -> NoReturn:
        raise RankingsError(f"{self._where}: {place}{what}; {todo}")

    def refuse(self, place: str, allowed: str, found: object) -> NoReturn:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        self.fail(place, f" must be {allowed} (got {shown})")

    def member(self, value: Any, name: str, place: str) -> Any:
        if not isinstance(value, dict):
            self.refuse(place, "an object", value)
        if name not in value:
            self.fail(f"{place}.{name}" if place else name, " is missing")
        return value[name]

    def items(self, value: Any, name: str, place: str) -> list[Any]:
        found = self.member(value, name, place)
        if not isinstance(found, list):
            self.refuse(f"{place}.{name}" if place else name, "a list", found)
        return found

    def each(self, value: Any, name: str, place: str, read: Callable[[Any, str], _T]) -> list[_T]:
        path = f"{place}.{name}" if place else name
        return [
            read(one, f"{path}[{number}]")
            for number, one in enumerate(self.items(value, name, place))
        ]

    def text(self, value: Any, place: str) -> str:
        if (
            not isinstance(value, str)
            or not value.isprintable()
            or not 0 < len(value) <= _MOST_TEXT
        ):
            self.refuse(place, f"printable text of 1 to {_MOST_TEXT} characters", value)
        return value

    def number(self, value: Any, place: str, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            self.refuse(place, f"an integer in {least}..{most}", value)
        return value

    def _unique(self, place: str, values: Sequence[Hashable]) -> None:
        if len(set(values)) != len(values):
            self.fail(place, f" has one entry twice: {str(_first_twice(values))[:80]}")


class RankingsFile(_Checker):
    """A rankings file that reads and checks each problem's measurements on request.

    Args:
        where: The file's name in messages.
        data: The file's content.

    Attributes:
        problems: The problems with measurements.

    Raises:
        RankingsError: If it is damaged, or is no rankings file in a known version.
    """

    def __init__(self, where: str, data: bytes) -> None:
        super().__init__(where)
        document = self._document(data)
        self._operators = self.each(document, "operators", "", self._operator)
        self._origins = self.each(document, "origins", "", self._origin)
        self._unique("operators", self._operators)
        self._unique("origins", [canonical_json(one.document) for one in self._origins])
        self._on_day: dict[tuple[int, str], Origin] = {}
        places = [
            (self._problem(value, path := f"problems[{place}]"), path, value)
            for place, value in enumerate(self.items(document, "problems", ""))
        ]
        self._unique("problems", [problem.key for problem, _, _ in places])
        self._places = {problem: (path, value) for problem, path, value in places}
        self.problems = tuple(self._places)

    def rankings(self) -> Rankings:
        """Reads all measurements."""
        found = [entry for problem in self.problems for entry in self.entries(problem)]
        by_key = {entry.sort_key: entry for entry in found}
        if len(by_key) != len(found):
            problem, *_ = _first_twice(entry.sort_key for entry in found)
            self.fail(
                "problems", f": {problem.key} has one measurement twice",
                "merge drops what is equal: nvgemm-aot rankings merge",
            )  # fmt: skip
        return Rankings(entries=tuple(by_key[key] for key in sorted(by_key)))

    def entries(self, problem: Problem) -> tuple[Entry, ...]:
        """Reads the measurements for one entry in ``problems``."""
        path, value = self._places[problem]
        measurements = self.items(value, "measurements", path)
        if not measurements:
            self.refuse(f"{path}.measurements", "at least one measurement", [])
        return tuple(
            self._entry(one, f"{path}.measurements[{number}]", problem)
            for number, one in enumerate(measurements)
        )

    def _document(self, data: bytes) -> dict[str, Any]:
        if len(data) > MOST_BYTES:
            self.fail("", f"has more than {MOST_BYTES} bytes", "is it a rankings file? Split it")
        if data.startswith(MAGIC):
            self.fail(
                "", "is a bundle, must be a rankings file",
                f"take its rankings: nvgemm-aot rankings export {self._where} -o FILE",
            )  # fmt: skip
        try:
            document = json.loads(
                data, object_pairs_hook=self._object, parse_constant=self._constant,
                parse_int=self._integer if _LONG_NUMBER.search(data) else None,
            )  # fmt: skip
        except (ValueError, RecursionError) as error:
            self.fail("", f"is no JSON: {type(error).__name__}: {str(error)[:100]}")
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            shown = document.get("format") if isinstance(document, dict) else document
            self.refuse("format", f"{FORMAT!r}", shown)
        if document.get("version") != VERSION or type(document["version"]) is not int:
            self.fail(
                "version",
                f" is {document.get('version')!r:.20}, this release reads {VERSION}",
                f"{UPGRADE}, or export the file with this release",
            )
        return document

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            twice = _first_twice(name for name, _ in pairs)
            self.fail("", f"an object has {twice[:40]!r} twice")
        return document

    def _constant(self, text: str) -> NoReturn:
        self.fail("", f"has the number {text}, which JSON does not have")

    def _integer(self, text: str) -> int:
        if len(text) > len(str(_MOST_NS)) + 1:
            self.fail("", f"has an integer of {len(text)} digits, must be at most {_MOST_NS}")
        return int(text)

    def _operator(self, value: Any, place: str) -> Operator:
        if not isinstance(value, list) or len(value) != 2:
            self.refuse(place, "a list of provider and operator", value)
        provider, operator = (self.text(one, place) for one in value)
        return Operator(provider=provider, operator=operator)

    def _origin(self, value: Any, place: str) -> Origin:
        """Reads an origin, whose conditions have no day yet."""
        toolchain = self.member(value, "toolchain", place)
        if not isinstance(toolchain, dict) or not toolchain:
            self.refuse(f"{place}.toolchain", "an object of versions", toolchain)
        for name, version in toolchain.items():
            self.text(name, f"{place}.toolchain")
            self.text(version, f"{place}.toolchain.{name}")
        arch = self.text(self.member(value, "arch", place), f"{place}.arch")
        try:
            Target(arch=arch)
        except (NvgemmError, ValueError):
            self.refuse(f"{place}.arch", "an architecture such as sm_90a", arch)
        given = self.member(value, "conditions", place)
        within = f"{place}.conditions"
        texts = {
            name: self.text(self.member(given, name, within), f"{within}.{name}")
            for name in ("driver", "torch", "cuda")
        }
        gpu = given.get("gpu_sha256")
        if "gpu_sha256" in given and not _is_digest(gpu):
            self.refuse(f"{within}.gpu_sha256", "64 lower-case hex digits", gpu)
        return Origin(
            arch=arch,
            toolchain=toolchain,
            gpu=self.text(self.member(value, "gpu", place), f"{place}.gpu"),
            by=self.text(self.member(value, "by", place), f"{place}.by"),
            cache=self.text(value.get("cache", COLD), f"{place}.cache"),
            conditions=Conditions(
                **texts,
                date="",
                launches=self.text(given.get("launches", BACK_TO_BACK), f"{within}.launches"),
                gpu_sha256=gpu,
            ),
        )

    def _problem(self, value: Any, place: str) -> Problem:
        key = self.text(self.member(value, "problem", place), f"{place}.problem")
        try:
            problem = Problem.parse(key)
        except (NvgemmError, ValueError):
            self.refuse(
                f"{place}.problem", "a problem such as mm/tn/bf16xbf16/fp32/bf16/m1n4096k4096", key
            )
        if problem.key != key:
            self.refuse(f"{place}.problem", f"written {problem.key}", key)
        return problem

    def _origin_on_day(self, value: Any, place: str) -> Origin:
        """Reads a measurement's origin and day; equal ones share one object."""
        number = self.member(value, "origin", place)
        self.number(number, f"{place}.origin", 0, len(self._origins) - 1)
        date = self.text(self.member(value, "date", place), f"{place}.date")
        if (number, date) not in self._on_day:
            try:
                is_day = datetime.date.fromisoformat(date).isoformat() == date
            except ValueError:
                is_day = False
            if not is_day:
                self.refuse(f"{place}.date", "a day such as 2026-11-21", date)
            self._on_day[number, date] = self._origins[number].on(date)
        return self._on_day[number, date]

    def _entry(self, value: Any, place: str, problem: Problem) -> Entry:
        origin, operators = self._origin_on_day(value, place), self._operators
        kernels = []
        for which, one in enumerate(self.items(value, "kernels", place)):
            within = f"{place}.kernels[{which}]"
            if not isinstance(one, list) or len(one) != 3:
                self.refuse(within, "a list of operator, nanoseconds and spread", one)
            at = self.number(one[0], f"{within}[0]", 0, len(operators) - 1)
            kernels.append((operators[at], self._timing(one[1:], within)))
        times = [timing.time_ns for _, timing in kernels]
        if times != sorted(times) or not times:
            self.refuse(f"{place}.kernels", "at least one kernel, the fastest first", times)
        self._unique(f"{place}.kernels", [operator for operator, _ in kernels])
        aten, triton = (
            None if (one := self.member(value, name, place)) is None
            else self._timing(one, f"{place}.{name}")
            for name in ("aten", "triton")
        )  # fmt: skip
        repeated = value.get("repeated")
        if "repeated" in value:
            self.number(repeated, f"{place}.repeated", LEAST_REPEAT_S, _MOST_NS)
        return Entry(
            problem=problem,
            origin=origin,
            kernels=tuple(kernels),
            aten=aten,
            triton=triton,
            doubts=tuple(self.each(value, "doubts", place, self.text)),
            repeated=repeated,
        )

    def _timing(self, value: Any, place: str) -> Timing:
        if not isinstance(value, list) or len(value) != 2:
            self.refuse(place, "a list of nanoseconds and spread", value)
        return Timing(
            time_ns=self.number(value[0], place, 1, _MOST_NS),
            spread_ns=self.number(value[1], place, 0, _MOST_NS),
        )


def _first_twice(values: Iterable[_H]) -> _H:
    """Returns the first repeated value; there must be one."""
    seen: set[_H] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    raise ValueError("no value is there twice")


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
