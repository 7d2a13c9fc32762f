"""Text of a recording: a manifest that only programs write and read.

Each GEMM takes one line, in a fixed form and order, so that a reader can detect an edited copy.
GEMMs that no manifest can declare follow as comments.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field

from ..errors import one_line
from ..gemm.epilogues import Epilogue
from ..gemm.problem import DType, Layout, Op, Problem, Signature
from ..gemm.target import CUDA_VERSIONS, ORDERED_ARCHITECTURES, PLATFORMS, Target
from ..gemm.types import ScaleRecipe

TARGETS = ORDERED_ARCHITECTURES
"""Architectures that a recording can name: those that the builder supports."""

_FIRST_LINE = "# Recorded by nvgemm-aot, form 1. Later runs merge into this file: edit a copy."
_OTHERS_LINE = "# Met as well, with no kernel to build for it: how often, what, and why."
_VERSION_LINE = "version: 1"

_FIXED_LINES = (_FIRST_LINE, _VERSION_LINE, "gemms:", "gemms: []", _OTHERS_LINE)

_NAME = re.compile(r'name: "([a-z0-9.\-]+)"')
_ARCH, _PLATFORM, _CUDA = ("|".join(known) for known in (TARGETS, PLATFORMS, CUDA_VERSIONS))
_TARGET = (
    rf"(?:{_ARCH}|\{{arch: (?:{_ARCH})(?:, platform: (?:{_PLATFORM}))?(?:, cuda: (?:{_CUDA}))?\}})"
)
_TARGETS = re.compile(rf"targets: \[({_TARGET}(?:, {_TARGET})*)\]")
_GEMM = re.compile(
    r"- \{op: (?P<op>\w+), dtype: (?P<dtype>\w+),(?: dtype_b: (?P<dtype_b>\w+),)?"
    r" out: (?P<out>\w+), layout: (?P<layout>\w+),"
    r"(?: scales: (?P<scales>\w+),)?(?: epilogue: (?P<epilogue>\w+),)?"
    r"(?: batch: (?P<batch>[1-9][0-9]*),)?(?: groups: (?P<groups>[1-9][0-9]*),)?"
    r" m: (?P<m>[1-9][0-9]*), n: (?P<n>[1-9][0-9]*), k: (?P<k>[1-9][0-9]*),"
    r" count: (?P<count>[1-9][0-9]*)\}"
)
_OTHER = re.compile(r"# ([1-9][0-9]*) x (.+)")


@dataclass(kw_only=True)
class Recording:
    """Recorded GEMMs with their counts.

    Attributes:
        name: Manifest name.
        targets: Manifest targets, as `target_entry` writes them.
        problems: Declared problems.
        undeclarable: GEMMs that a manifest cannot declare, each described on one line.
    """

    name: str
    targets: set[str] = field(default_factory=set)
    problems: Counter[Problem] = field(default_factory=Counter)
    undeclarable: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Recording) -> None:
        """Adds the GEMMs of another recording."""
        self.targets |= other.targets
        self.problems.update(other.problems)
        for text, count in other.undeclarable.items():
            self.undeclarable[one_line(text)] += count

    def render(self) -> str:
        """Returns the file's text."""
        lines = [
            _FIRST_LINE,
            _VERSION_LINE,
            f'name: "{self.name}"',
            f"targets: [{', '.join(sorted(self.targets))}]",
            "gemms:" if self.problems else "gemms: []",
        ]
        ordered = sorted(self.problems.items(), key=lambda item: _sort_key(item[0]))
        lines += [gemm_line(problem, count) for problem, count in ordered]
        if self.undeclarable:
            lines.append(_OTHERS_LINE)
            lines += [f"# {count} x {text}" for text, count in sorted(self.undeclarable.items())]
        return "\n".join([*lines, ""])


def parse(text: str) -> Recording:
    """Reads a recording.

    Raises:
        ValueError: If the text is not exactly `Recording.render`'s. The message names the line.
    """
    recording = Recording(name="")
    for number, line in enumerate(text.splitlines(), start=1):
        if not _read_line(line, recording):
            raise ValueError(f"line {number} is {line[:80]!r}")
    lines = itertools.zip_longest(text.split("\n"), recording.render().split("\n"), fillvalue="")
    for number, (actual, expected) in enumerate(lines, start=1):
        if actual != expected:
            raise ValueError(f"line {number} is {actual[:80]!r}, must be {expected[:80]!r}")
    if not text.endswith("\n"):
        raise ValueError("the last line is cut off")
    return recording


def read_others(text: str) -> Counter[str]:
    """Reads `Recording.undeclarable`, even from an edited recording. Empty for other manifests."""
    undeclarable: Counter[str] = Counter()
    _, _, comments = text.partition(f"\n{_OTHERS_LINE}\n")
    for line in comments.splitlines():
        if match := _OTHER.fullmatch(line):
            undeclarable[match[2]] += int(match[1])
    return undeclarable


def _read_line(line: str, recording: Recording) -> bool:
    """Adds a line's declaration. Returns False if no recording has such a line."""
    if match := _GEMM.fullmatch(line):
        try:
            problem = _problem(match.groupdict())
        except ValueError:
            return False
        recording.problems[problem] += int(match["count"])
    elif match := _OTHER.fullmatch(line):
        recording.undeclarable[match[2]] += int(match[1])
    elif match := _NAME.fullmatch(line):
        recording.name = match[1]
    elif match := _TARGETS.fullmatch(line):
        recording.targets = {*re.findall(_TARGET, match[1])}
    else:
        return line in _FIXED_LINES
    return True


def _problem(texts: dict[str, str | None]) -> Problem:
    """Builds the problem that an entry declares."""
    operand = DType(texts["dtype"])
    scales, epilogue = texts["scales"], texts["epilogue"]
    signature = Signature(
        op=Op(texts["op"]),
        layout=Layout(texts["layout"]),
        a=operand,
        b=DType(texts["dtype_b"] or operand),
        accumulator=operand.accumulator,
        out=DType(texts["out"]),
        scales=None if scales is None else ScaleRecipe(scales),
        epilogue=None if epilogue is None else Epilogue.parse(epilogue),
    )
    sizes = {name: int(texts[name] or 1) for name in ("m", "n", "k", "batch", "groups")}
    return Problem(signature=signature, **sizes)


def target_entry(target: Target) -> str:
    """Returns the ``targets`` entry that declares a target, on one line, e.g. ``sm_90a``.

    Other platforms or CUDA versions than the default give ``{arch: sm_90a, cuda: cu12}``.
    """
    values = {"platform": target.platform, "cuda": target.cuda}
    unusual = [f"{key}: {value}" for key, value in values.items() if value != getattr(Target, key)]
    return f"{{{', '.join([f'arch: {target.arch}', *unusual])}}}" if unusual else target.arch


def gemm_line(problem: Problem, count: int | None = None) -> str:
    """Returns the ``gemms`` entry that declares a problem, on one line."""
    signature = problem.signature
    values = {
        "op": signature.op.value,
        "dtype": signature.dtype.value,
        "dtype_b": None if signature.b is signature.dtype else signature.b.value,
        "out": signature.out.value,
        "layout": signature.layout.value,
        "scales": signature.scales and signature.scales.value,
        "epilogue": signature.epilogue and signature.epilogue.name,
        "batch": problem.batch if signature.op is Op.BMM else None,
        "groups": problem.groups if signature.op.has_groups else None,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "count": count,
    }
    fields = (f"{key}: {value}" for key, value in values.items() if value is not None)
    return f"- {{{', '.join(fields)}}}"


def _sort_key(problem: Problem) -> tuple[str, int, int, int, int]:
    return (problem.signature.key, problem.n, problem.k, problem.batch * problem.groups, problem.m)


def manifest_name(stem: str) -> str:
    """Returns a valid manifest name made from a file name without its suffix."""
    name = re.sub(r"[^a-z0-9.]+", "-", stem.lower()).strip("-.")
    return name[:64].strip("-.") or "recorded"
