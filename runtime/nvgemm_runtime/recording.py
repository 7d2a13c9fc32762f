"""The text of a recording: a manifest that is written and read by machines alone.

One line a GEMM, in one form and one order, so that what was read back is known to be what was
written. What no manifest can declare stands behind it, as comments.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, field

from .problem import DType, Layout, Op, Problem, Signature

TARGETS = ("sm_90a", "sm_100a", "sm_100f", "sm_103a")
"""What a recording can be made for: what the builder builds for."""

_FIRST_LINE = "# Recorded by nvgemm-aot, form 1. Later runs merge into this file: edit a copy."
_OTHERS_LINE = "# Met as well, with no kernel to build for it: how often, what, and why."
_VERSION_LINE = "version: 1"

_NAME = re.compile(r'name: "([a-z0-9.\-]+)"')
_TARGETS = re.compile(r"targets: \[([a-z0-9_]+(?:, [a-z0-9_]+)*)\]")
_GEMM = re.compile(
    r"- \{op: (\w+), dtype: (\w+), out: (\w+), layout: (\w+),(?: batch: ([1-9][0-9]*),)?"
    r" m: ([1-9][0-9]*), n: ([1-9][0-9]*), k: ([1-9][0-9]*), count: ([1-9][0-9]*)\}"
)
_OTHER = re.compile(r"# ([1-9][0-9]*) x (.+)")


@dataclass(kw_only=True)
class Recording:
    """GEMMs that were met, and how often.

    Attributes:
        name: The manifest's.
        targets: The manifest's; some of `TARGETS`.
        problems: What it declares.
        others: What it cannot declare, each in words on one line.
    """

    name: str
    targets: set[str] = field(default_factory=set)
    problems: Counter[Problem] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Recording) -> None:
        """Take in what another recording has."""
        self.targets |= other.targets
        self.problems.update(other.problems)
        self.others.update({_line(text): count for text, count in other.others.items()})

    def render(self) -> str:
        """The file's text."""
        lines = [
            _FIRST_LINE,
            _VERSION_LINE,
            f'name: "{self.name}"',
            f"targets: [{', '.join(sorted(self.targets))}]",
            "gemms:" if self.problems else "gemms: []",
        ]
        ordered = sorted(self.problems.items(), key=lambda met: _order(met[0]))
        lines += [_gemm_line(problem, count) for problem, count in ordered]
        if self.others:
            lines.append(_OTHERS_LINE)
            lines += [f"# {count} x {text}" for text, count in sorted(self.others.items())]
        return "\n".join([*lines, ""])


def parse(text: str) -> Recording:
    """Read a recording.

    Raises:
        ValueError: If it is not, to the letter, what `Recording.render` would write; the message
            names the first line that differs.
    """
    recording = Recording(name="")
    for line in text.splitlines():
        _read_line(line, recording)
    for number, (found, expected) in enumerate(
        zip(text.split("\n"), recording.render().split("\n")), start=1
    ):
        if found != expected:
            raise ValueError(f"line {number} is {found[:80]!r}, must be {expected[:80]!r}")
    return recording


def read_others(text: str) -> Counter[str]:
    """What a recording has in `Recording.others`, even where it was edited since.

    Any other manifest has none.
    """
    others: Counter[str] = Counter()
    _, _, comments = text.partition(f"\n{_OTHERS_LINE}\n")
    for line in comments.splitlines():
        if match := _OTHER.fullmatch(line):
            others[match[2]] += int(match[1])
    return others


def _read_line(line: str, recording: Recording) -> None:
    """Take in what a line says; one that says nothing is missing when the text is made again."""
    if match := _GEMM.fullmatch(line):
        op, dtype, out, layout, batch, m, n, k, count = match.groups()
        with contextlib.suppress(ValueError):
            operand = DType(dtype)
            signature = Signature(
                op=Op(op),
                layout=Layout(layout),
                a=operand,
                b=operand,
                accumulator=DType.INT32 if operand.is_integer else DType.FP32,
                out=DType(out),
            )
            sizes = {"m": int(m), "n": int(n), "k": int(k), "batch": int(batch or 1)}
            recording.problems[Problem(signature=signature, **sizes)] += int(count)
    elif match := _OTHER.fullmatch(line):
        recording.others[match[2]] += int(match[1])
    elif match := _NAME.fullmatch(line):
        recording.name = match[1]
    elif match := _TARGETS.fullmatch(line):
        recording.targets = set(match[1].split(", ")) & {*TARGETS}


def _gemm_line(problem: Problem, count: int) -> str:
    signature = problem.signature
    batch = f" batch: {problem.batch}," if signature.op is Op.BMM else ""
    return (
        f"- {{op: {signature.op.value}, dtype: {signature.a.value}, out: {signature.out.value}, "
        f"layout: {signature.layout.value},{batch} m: {problem.m}, n: {problem.n}, "
        f"k: {problem.k}, count: {count}}}"
    )


def _order(problem: Problem) -> tuple[str, int, int, int, int]:
    return (problem.signature.key, problem.n, problem.k, problem.batch, problem.m)


def _line(text: str) -> str:
    """A text as one line that YAML takes for a comment, whatever is in it."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def manifest_name(stem: str) -> str:
    """A manifest's name made of a file's, without its suffix."""
    name = re.sub(r"[^a-z0-9.]+", "-", stem.lower()).strip("-.")
    return name[:64].strip("-.") or "recorded"
