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
from nvgemm_runtime.bundle.format import MAGIC, canonical_json
from nvgemm_runtime.bundle.ranking_entries import BACK_TO_BACK, LEAST_REPEAT_S, Conditions, Timing
from nvgemm_runtime.errors import UPGRADE, NvgemmError, RankingsError, StorageError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installed.policy_checks import check_file

from ..storage.files import IrregularFileError, read_start
from ..storage.signed_files import write_signable
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
    write_signable({path: encode(rankings)})


def encode(rankings: Rankings) -> bytes:
    """Encodes rankings as a file's bytes."""
    origins = {canonical_json(entry.origin.document) for entry in rankings.entries}
    operators = {operator for entry in rankings.entries for operator, _ in entry.kernels}
    origin_indices, operator_indices = _indices(origins), _indices(operators)
    problems: dict[str, list[dict[str, Any]]] = {}
    for entry in rankings.entries:
        problems.setdefault(entry.problem.key, []).append(
            {
                "origin": origin_indices[canonical_json(entry.origin.document)],
                "date": entry.origin.conditions.date,
                "kernels": [
                    [operator_indices[operator], timing.time_ns, timing.spread_ns]
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
            canonical_json([operator.provider, operator.operator]) for operator in operator_indices
        ),
        "origins": _lines(origin_indices),
        "problems": _lines(
            canonical_json({"problem": key, "measurements": measurements})
            for key, measurements in problems.items()
        ),
        "version": canonical_json(VERSION),
    }
    members = [canonical_json(name) + b":" + value for name, value in parts.items()]
    return b"{" + b",\n".join(members) + b"}\n"


def _indices(values: Iterable[_S]) -> dict[_S, int]:
    """Maps each value to its index in sorted order."""
    return {value: index for index, value in enumerate(sorted(values))}


def _lines(values: Any) -> bytes:
    return b"[\n" + b",\n".join(values) + b"\n]"


def read_rankings(path: Path, *, is_only_shown: bool = False) -> Rankings:
    """Reads a file.

    Args:
        path: The file.
        is_only_shown: True to read it whatever the policy says.

    Raises:
        StorageError: If the file cannot be read.
        SignatureError: If the policy refuses it.
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
    if not is_only_shown:
        check_file(path, data)
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

    def fail(self, position: str, fault: str, todo: str = _EXPORT) -> NoReturn:
        raise RankingsError(f"{self._where}: {position}{fault}; {todo}")

    def refuse(self, position: str, allowed: str, value: object) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        self.fail(position, f" must be {allowed} (got {shown})")

    def member(self, value: Any, name: str, position: str) -> Any:
        if not isinstance(value, dict):
            self.refuse(position, "an object", value)
        if name not in value:
            self.fail(f"{position}.{name}" if position else name, " is missing")
        return value[name]

    def items(self, value: Any, name: str, position: str) -> list[Any]:
        items = self.member(value, name, position)
        if not isinstance(items, list):
            self.refuse(f"{position}.{name}" if position else name, "a list", items)
        return items

    def each(
        self, value: Any, name: str, position: str, read: Callable[[Any, str], _T]
    ) -> list[_T]:
        path = f"{position}.{name}" if position else name
        return [
            read(item, f"{path}[{number}]")
            for number, item in enumerate(self.items(value, name, position))
        ]

    def text(self, value: Any, position: str) -> str:
        if (
            not isinstance(value, str)
            or not value.isprintable()
            or not 0 < len(value) <= _MOST_TEXT
        ):
            self.refuse(position, f"printable text of 1 to {_MOST_TEXT} characters", value)
        return value

    def number(self, value: Any, position: str, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            self.refuse(position, f"an integer in {least}..{most}", value)
        return value

    def _unique(self, position: str, values: Sequence[Hashable]) -> None:
        if len(set(values)) != len(values):
            self.fail(position, f" has one entry twice: {str(_first_twice(values))[:80]}")


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
        self._unique("origins", [canonical_json(origin.document) for origin in self._origins])
        self._on_day: dict[tuple[int, str], Origin] = {}
        values = [
            (self._problem(value, path := f"problems[{index}]"), path, value)
            for index, value in enumerate(self.items(document, "problems", ""))
        ]
        self._unique("problems", [problem.key for problem, _, _ in values])
        self._values = {problem: (path, value) for problem, path, value in values}
        self.problems = tuple(self._values)

    def rankings(self) -> Rankings:
        """Reads all measurements."""
        entries = [entry for problem in self.problems for entry in self.entries(problem)]
        by_key = {entry.sort_key: entry for entry in entries}
        if len(by_key) != len(entries):
            problem, *_ = _first_twice(entry.sort_key for entry in entries)
            self.fail(
                "problems", f": {problem.key} has one measurement twice",
                "to drop duplicates, run: nvgemm-aot rankings merge",
            )  # fmt: skip
        return Rankings(entries=tuple(by_key[key] for key in sorted(by_key)))

    def entries(self, problem: Problem) -> tuple[Entry, ...]:
        """Reads the measurements for one entry in ``problems``."""
        path, value = self._values[problem]
        measurements = self.items(value, "measurements", path)
        if not measurements:
            self.refuse(f"{path}.measurements", "at least one measurement", [])
        return tuple(
            self._entry(measurement, f"{path}.measurements[{number}]", problem)
            for number, measurement in enumerate(measurements)
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
            self.fail("", f"is not JSON: {type(error).__name__}: {str(error)[:100]}")
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

    def _operator(self, value: Any, position: str) -> Operator:
        if not isinstance(value, list) or len(value) != 2:
            self.refuse(position, "a list of provider and operator", value)
        provider, operator = (self.text(part, position) for part in value)
        return Operator(provider=provider, operator=operator)

    def _origin(self, value: Any, position: str) -> Origin:
        """Reads an origin, whose conditions have no day yet."""
        toolchain = self.member(value, "toolchain", position)
        if not isinstance(toolchain, dict) or not toolchain:
            self.refuse(f"{position}.toolchain", "an object of versions", toolchain)
        for name, version in toolchain.items():
            self.text(name, f"{position}.toolchain")
            self.text(version, f"{position}.toolchain.{name}")
        arch = self.text(self.member(value, "arch", position), f"{position}.arch")
        try:
            Target(arch=arch)
        except (NvgemmError, ValueError):
            self.refuse(f"{position}.arch", "an architecture such as sm_90a", arch)
        conditions = self.member(value, "conditions", position)
        within = f"{position}.conditions"
        texts = {
            name: self.text(self.member(conditions, name, within), f"{within}.{name}")
            for name in ("driver", "torch", "cuda")
        }
        gpu = conditions.get("gpu_sha256")
        if "gpu_sha256" in conditions and not _is_digest(gpu):
            self.refuse(f"{within}.gpu_sha256", "64 lower-case hex digits", gpu)
        return Origin(
            arch=arch,
            toolchain=toolchain,
            gpu=self.text(self.member(value, "gpu", position), f"{position}.gpu"),
            by=self.text(self.member(value, "by", position), f"{position}.by"),
            cache=self.text(value.get("cache", COLD), f"{position}.cache"),
            conditions=Conditions(
                **texts,
                date="",
                launches=self.text(conditions.get("launches", BACK_TO_BACK), f"{within}.launches"),
                gpu_sha256=gpu,
            ),
        )

    def _problem(self, value: Any, position: str) -> Problem:
        key = self.text(self.member(value, "problem", position), f"{position}.problem")
        try:
            problem = Problem.parse(key)
        except (NvgemmError, ValueError):
            self.refuse(
                f"{position}.problem",
                "a problem such as mm/tn/bf16xbf16/fp32/bf16/m1n4096k4096",
                key,
            )
        if problem.key != key:
            self.refuse(f"{position}.problem", f"written {problem.key}", key)
        return problem

    def _origin_on_day(self, value: Any, position: str) -> Origin:
        """Reads a measurement's origin and day; equal ones share one object."""
        number = self.member(value, "origin", position)
        self.number(number, f"{position}.origin", 0, len(self._origins) - 1)
        date = self.text(self.member(value, "date", position), f"{position}.date")
        if (number, date) not in self._on_day:
            try:
                is_day = datetime.date.fromisoformat(date).isoformat() == date
            except ValueError:
                is_day = False
            if not is_day:
                self.refuse(f"{position}.date", "a day such as 2026-11-21", date)
            self._on_day[number, date] = self._origins[number].on(date)
        return self._on_day[number, date]

    def _entry(self, value: Any, position: str, problem: Problem) -> Entry:
        origin, operators = self._origin_on_day(value, position), self._operators
        kernels = []
        for number, item in enumerate(self.items(value, "kernels", position)):
            within = f"{position}.kernels[{number}]"
            if not isinstance(item, list) or len(item) != 3:
                self.refuse(within, "a list of operator, nanoseconds and spread", item)
            index = self.number(item[0], f"{within}[0]", 0, len(operators) - 1)
            kernels.append((operators[index], self._timing(item[1:], within)))
        times = [timing.time_ns for _, timing in kernels]
        if times != sorted(times) or not times:
            self.refuse(f"{position}.kernels", "at least one kernel, the fastest first", times)
        self._unique(f"{position}.kernels", [operator for operator, _ in kernels])
        aten, triton = (
            None if (reference := self.member(value, name, position)) is None
            else self._timing(reference, f"{position}.{name}")
            for name in ("aten", "triton")
        )  # fmt: skip
        repeated = value.get("repeated")
        if "repeated" in value:
            self.number(repeated, f"{position}.repeated", LEAST_REPEAT_S, _MOST_NS)
        return Entry(
            problem=problem,
            origin=origin,
            kernels=tuple(kernels),
            aten=aten,
            triton=triton,
            doubts=tuple(self.each(value, "doubts", position, self.text)),
            repeated=repeated,
        )

    def _timing(self, value: Any, position: str) -> Timing:
        if not isinstance(value, list) or len(value) != 2:
            self.refuse(position, "a list of nanoseconds and spread", value)
        return Timing(
            time_ns=self.number(value[0], position, 1, _MOST_NS),
            spread_ns=self.number(value[1], position, 0, _MOST_NS),
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
