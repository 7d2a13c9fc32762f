"""Confirmations: bundled kernels timed beside one torch's ATen, in a file without code.

``nvgemm-aot confirm`` writes the file; `matching.confirmed_rankings` uses it. The file is JSON, and
docs/reference/confirmations.md describes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import RankingsError
from .format import canonical_json
from .ranking_entries import APART, Conditions, Timing

FORMAT_NAME = "confirmations of nvgemm-aot"
"""Value of the file's ``format``."""

VERSION = 1
"""Version of the format that this release writes, and the only one that it reads."""

MAX_BYTES = 16 << 20
"""Largest file that is read. A problem takes about 300 bytes, a large model has a thousand."""

MAX_TEXT = 500
"""Longest text in a file, in characters."""

MAX_NS = 10**12
"""Longest time and spread in a file: 1000 seconds."""

_HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True, kw_only=True)
class ConfirmedTimes:
    """Times of one problem's kernels beside ATen.

    Attributes:
        kernels: Each kernel's time, by id, fastest first; at least one.
        aten: ATen's time.
        doubts: Reasons not to rely on the times; empty for reliable ones.
    """

    kernels: Mapping[str, Timing]
    aten: Timing
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Confirmations:
    """Confirmations that one GPU measured with one torch.

    Attributes:
        gpu: GPU product, as its driver names it.
        by: Measuring program.
        conditions: Measuring conditions; launches are `APART`.
        problems: Times by problem key.
    """

    gpu: str
    by: str
    conditions: Conditions
    problems: Mapping[str, ConfirmedTimes]


def encode_confirmations(confirmations: Confirmations) -> bytes:
    """Returns a file's bytes; equal confirmations give equal bytes."""
    conditions = confirmations.conditions
    document = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "by": confirmations.by,
        "gpu": confirmations.gpu,
        "gpu_sha256": conditions.gpu_sha256,
        "driver": conditions.driver,
        "torch": conditions.torch,
        "cuda": conditions.cuda,
        "date": conditions.date,
        "problems": {
            key: {
                "aten": _pair(times.aten),
                "doubts": list(times.doubts),
                "kernels": [[id_, *_pair(timing)] for id_, timing in times.kernels.items()],
            }
            for key, times in confirmations.problems.items()
        },
    }
    return canonical_json(document) + b"\n"


def _pair(timing: Timing) -> list[int]:
    return [timing.time_ns, timing.spread_ns]


def decode_confirmations(data: bytes, where: str) -> Confirmations:
    """Reads a file's bytes.

    Args:
        data: File content.
        where: File name, for messages.

    Raises:
        RankingsError: If the file breaks a rule; names the observed and the allowed value.
    """
    return _Reader(where).confirmations(data)


class _Reader:
    """Checks a file's values; each comes with its path in the document."""

    def __init__(self, where: str) -> None:
        self._where = where

    def confirmations(self, data: bytes) -> Confirmations:
        document = self._document(data)
        problems = document["problems"]
        if not isinstance(problems, dict):
            self._refuse("problems", "an object", problems)
        gpu_sha256 = document["gpu_sha256"]
        if gpu_sha256 is not None:
            gpu_sha256 = self._digest(gpu_sha256, "gpu_sha256")
        texts = {
            name: self._text(document[name], name)
            for name in ("by", "gpu", "driver", "torch", "cuda", "date")
        }
        return Confirmations(
            gpu=texts["gpu"],
            by=texts["by"],
            conditions=Conditions(
                driver=texts["driver"],
                torch=texts["torch"],
                cuda=texts["cuda"],
                date=texts["date"],
                launches=APART,
                gpu_sha256=gpu_sha256,
            ),
            problems={
                self._text(key, "a problem"): self._times(value, f"problems.{key:.80}")
                for key, value in problems.items()
            },
        )

    def _document(self, data: bytes) -> dict[str, Any]:
        if len(data) > MAX_BYTES:
            self._fail(f"it has {len(data)} bytes, at most {MAX_BYTES} are allowed")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._fail(f"it is no JSON: {error}")
        if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
            found = document.get("format") if isinstance(document, dict) else document
            self._refuse("format", repr(FORMAT_NAME), found)
        if type(document.get("version")) is not int or document["version"] != VERSION:
            self._refuse("version", f"{VERSION} for this release", document.get("version"))
        return self._members(
            document,
            "the file",
            ("by", "gpu", "gpu_sha256", "driver", "torch", "cuda", "date", "problems"),
        )

    def _times(self, value: object, path: str) -> ConfirmedTimes:
        members = self._members(value, path, ("kernels", "aten", "doubts"))
        kernels: dict[str, Timing] = {}
        for position, entry in enumerate(self._list(members["kernels"], f"{path}.kernels")):
            where = f"{path}.kernels[{position}]"
            if not isinstance(entry, list) or len(entry) != 3:
                self._refuse(where, "[id, time_ns, spread_ns]", entry)
            id_ = self._digest(entry[0], f"{where}[0]")
            if id_ in kernels:
                self._refuse(where, "a kernel that is not listed twice", id_)
            kernels[id_] = self._timing(entry[1:], where)
        if not kernels:
            self._refuse(f"{path}.kernels", "a list with at least one kernel", members["kernels"])
        times_ns = [timing.time_ns for timing in kernels.values()]
        if times_ns != sorted(times_ns):
            self._refuse(f"{path}.kernels", "ordered by time, fastest first", times_ns)
        doubts = self._list(members["doubts"], f"{path}.doubts")
        return ConfirmedTimes(
            kernels=kernels,
            aten=self._timing(members["aten"], f"{path}.aten"),
            doubts=tuple(self._text(doubt, f"{path}.doubts") for doubt in doubts),
        )

    def _timing(self, value: object, path: str) -> Timing:
        if not isinstance(value, list) or len(value) != 2:
            self._refuse(path, "[time_ns, spread_ns]", value)
        time_ns, spread_ns = value
        for name, number, least in (("time", time_ns, 1), ("spread", spread_ns, 0)):
            if type(number) is not int or not least <= number <= MAX_NS:
                self._refuse(f"{path}: its {name}", f"{least} to {MAX_NS} nanoseconds", number)
        return Timing(time_ns=time_ns, spread_ns=spread_ns)

    def _members(self, value: object, path: str, names: tuple[str, ...]) -> dict[str, Any]:
        """Reads an object that has all these members; others are left to later releases."""
        if not isinstance(value, dict):
            self._refuse(path, "an object", value)
        missing = [name for name in names if name not in value]
        if missing:
            self._fail(f"{path} lacks {', '.join(missing)}, which it must have")
        return value

    def _list(self, value: object, path: str) -> list[Any]:
        if not isinstance(value, list):
            self._refuse(path, "a list", value)
        return value

    def _text(self, value: object, path: str) -> str:
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= MAX_TEXT:
            self._refuse(path, f"1 to {MAX_TEXT} printable characters", value)
        return value

    def _digest(self, value: object, path: str) -> str:
        if not isinstance(value, str) or len(value) != 64 or set(value) - _HEX_DIGITS:
            self._refuse(path, "64 lower-case hex digits", value)
        return value

    def _refuse(self, path: str, allowed: str, value: object) -> NoReturn:
        self._fail(f"{path} must be {allowed} (got {value!r:.80})")

    def _fail(self, message: str) -> NoReturn:
        raise RankingsError(
            f"{self._where}: no confirmations: {message}; remove the file, and on the GPU, run: "
            "nvgemm-aot confirm"
        )
