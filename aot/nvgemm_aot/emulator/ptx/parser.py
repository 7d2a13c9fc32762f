"""Parses the text of a PTX module with one kernel.

The text is what NVVM writes (PTX ISA, "Syntax", "State Spaces, Types, and Variables"). What the
parser does not know is an error that names it.
"""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field

from ..emulation_errors import UnsupportedPtxError
from .program import Instruction, Parameter, Program
from .ptx_operands import (
    Address,
    Immediate,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from .reconvergence import immediate_post_dominators

OLDEST_VERSION, NEWEST_VERSION = (8, 0), (9, 4)
"""PTX versions whose instructions the emulator implements."""

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_103f")
"""Values of ``.target`` that it implements."""

_SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (32, 64)
}
_REGISTER_TYPES = {"pred", "b128", "bf16", "f16x2", "bf16x2", *_SIZES}

_IGNORED_DIRECTIVES = {
    "maxntid",
    "minnctapersm",
    "maxnreg",
    "blocksareclusters",
    "reqnctapercluster",
    "explicitcluster",
    "maxclusterrank",
}
"""Directives of a kernel that change nothing that a program computes."""

_NAME = r"[%_$A-Za-z][\w$]*"
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_ENTRY = re.compile(
    r"(?:\.(?:visible|weak)\s+)?\.entry\s+(\w+)\s*\((.*?)\)\s*((?:\.\w+[^{]*)?)\{", re.S
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?"
    r"\s+(\w+)(?:\[(\d+)\])?$"
)
_SHARED = re.compile(
    r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d*)\])?$"
)
_SOURCE_LINE = re.compile(r"\.(?:loc|file)\s[^\n]*")
"""Directives that name a line or file of the source; they end with their own line."""

_AROUND = re.compile(
    r"\.version\s+\S+|\.target\s+[\w, ]+|\.address_size\s+64|(?:\.extern\s+)?\.shared[^;]*;"
    rf"|{_SOURCE_LINE.pattern}|\.section\s+\.debug\w*\s*\{{[^}}]*\}}"
)
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z]\w*)((?:\.\w+(?:::\w+)*)*)\s*(.*)$", re.S)


def parse(text: str) -> Program:
    """Parses a module.

    Raises:
        UnsupportedPtxError: If the text is not such a module, or has a part that is not known.
    """
    return _Parser(text).program()


@dataclass
class _Scope:
    """Names in a pair of braces: registers, vectors of them, and labels."""

    registers: dict[str, Register] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class _Statement:
    """An instruction, before its operands are resolved."""

    text: str
    line: int
    scopes: tuple[_Scope, ...]


class _Parser:
    def __init__(self, text: str) -> None:
        # Comments keep their line ends, so that lines can be counted.
        self._text = re.sub(
            r"//[^\n]*|/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S
        )
        self._line_ends = [found.start() for found in re.finditer("\n", self._text)]
        self._registers: list[str] = []
        self._statements: list[_Statement] = []
        self._symbols: set[str] = set()

    def program(self) -> Program:
        version, target = self._header()
        entries = list(_ENTRY.finditer(self._text))
        if len(entries) != 1:
            raise UnsupportedPtxError(f"the module has {len(entries)} kernels, must have 1")
        (entry,) = entries
        parameters, parameter_bytes = self._parameters(entry[2])
        shared, static_bytes = self._shared(self._text[: entry.start()])
        self._symbols = {*shared, *(each.name for each in parameters)}
        self._check_around(self._text[: entry.start()])
        self._check_around(self._text[self._body(entry.end()) :])
        instructions = tuple(map(self._instruction, self._statements))
        return Program(
            entry=entry[1],
            version=version,
            target=target,
            parameters=parameters,
            parameter_bytes=parameter_bytes,
            shared_symbols=shared,
            static_shared_bytes=static_bytes,
            required_block=self._directives(entry[3]),
            registers=tuple(self._registers),
            instructions=instructions,
            reconvergence=immediate_post_dominators(instructions),
        )

    def _check_around(self, text: str) -> None:
        """Checks that nothing but a header and shared variables stands beside the kernel."""
        if left := _AROUND.sub("", text).split():
            raise UnsupportedPtxError(
                f"{' '.join(left[:6])!r} beside the kernel is not known to the emulator"
            )

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._line_ends, position) + 1

    def _header(self) -> tuple[tuple[int, int], str]:
        found = re.search(r"\.version\s+(\d+)\.(\d+)\s+\.target\s+([\w, ]+)", self._text)
        if found is None:
            raise UnsupportedPtxError("the text has no .version and .target, so it is not PTX")
        version, target = (int(found[1]), int(found[2])), found[3].strip()
        if not OLDEST_VERSION <= version <= NEWEST_VERSION:
            allowed = "{}.{} to {}.{}".format(*OLDEST_VERSION, *NEWEST_VERSION)
            raise UnsupportedPtxError(f"PTX version is {found[1]}.{found[2]}, must be {allowed}")
        if target not in ARCHITECTURES:
            raise UnsupportedPtxError(
                f".target is {target!r}, must be one of {', '.join(ARCHITECTURES)}"
            )
        return version, target

    def _parameters(self, text: str) -> tuple[tuple[Parameter, ...], int]:
        found, offset = [], 0
        for declared in filter(None, map(str.strip, text.split(","))):
            match = _PARAMETER.match(declared)
            if match is None or match[2] not in _SIZES:
                raise UnsupportedPtxError(f"parameter {declared!r} is not known to the emulator")
            size = _SIZES[match[2]] * int(match[4] or 1)
            align = int(match[1] or _SIZES[match[2]])
            offset = -(-offset // align) * align
            found.append(Parameter(name=match[3], offset=offset, size=size))
            offset += size
        return tuple(found), offset

    def _shared(self, text: str) -> tuple[dict[str, int], int]:
        """Returns the offsets of shared variables; dynamic memory begins behind the others."""
        offsets: dict[str, int] = {}
        dynamic: list[tuple[str, int]] = []
        end = 0
        for declared in re.findall(r"(?:\.extern\s+)?\.shared[^;]*", text):
            match = _SHARED.match(declared.strip())
            if match is None or match[3] not in _SIZES:
                raise UnsupportedPtxError(f"{declared.strip()!r} is not known to the emulator")
            align = int(match[2] or _SIZES[match[3]])
            if match[1]:
                dynamic.append((match[4], align))
                continue
            end = -(-end // align) * align
            offsets[match[4]] = end
            end += _SIZES[match[3]] * int(match[5] or 1)
        for name, align in dynamic:
            offsets[name] = -(-end // align) * align
        return offsets, end

    def _directives(self, text: str) -> tuple[int, int, int] | None:
        required = None
        for name, values in re.findall(r"\.(\w+)([^.]*)", text):
            numbers = [int(each) for each in values.replace(",", " ").split()]
            if name == "reqntid":
                x, y, z = (*numbers, 1, 1)[:3]
                required = (x, y, z)
            elif name not in _IGNORED_DIRECTIVES:
                raise UnsupportedPtxError(f"directive .{name} is not known to the emulator")
        return required

    def _body(self, position: int) -> int:
        """Reads the kernel's statements; returns the position behind its end."""
        text, scopes = self._text, [_Scope()]
        while True:
            position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
            if position == len(text):
                raise UnsupportedPtxError("the module ends within its kernel")
            if text[position] == "{":
                scopes.append(_Scope())
                position += 1
            elif text[position] == "}":
                scopes.pop()
                position += 1
                if not scopes:
                    return position
            elif label := _LABEL.match(text, position):
                scopes[-1].labels[label[1]] = len(self._statements)
                position = label.end()
            elif source := _SOURCE_LINE.match(text, position):
                position = source.end()
            else:
                end = text.find(";", position)
                if end < 0:
                    raise UnsupportedPtxError("the module ends within its kernel")
                statement = " ".join(text[position:end].split())
                if statement.startswith(".reg"):
                    self._declare(statement, scopes[-1])
                elif not statement.startswith("."):
                    self._statements.append(
                        _Statement(statement, self._line(position), tuple(scopes))
                    )
                elif not statement.startswith(".pragma "):
                    raise UnsupportedPtxError(
                        f"line {self._line(position)}: {statement} is not known to the emulator"
                    )
                position = end + 1

    def _declare(self, statement: str, scope: _Scope) -> None:
        match = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", statement)
        if match is None or match[2] not in _REGISTER_TYPES:
            raise UnsupportedPtxError(f"{statement!r} is not known to the emulator")
        kind = match[2]
        for declared in match[3].split(","):
            name, _, count = declared.strip().rstrip(">").partition("<")
            if match[1]:
                parts = [f"{name}.{part}" for part in "xyzw"[: int(match[1])]]
                scope.vectors[name] = Vector(tuple(self._new(scope, each, kind) for each in parts))
                continue
            for each in [f"{name}{number}" for number in range(int(count))] if count else [name]:
                self._new(scope, each, kind)

    def _new(self, scope: _Scope, name: str, kind: str) -> Register:
        register = scope.registers[name] = Register(len(self._registers), name, kind)
        self._registers.append(kind)
        return register

    def _instruction(self, statement: _Statement) -> Instruction:
        match = _STATEMENT.match(statement.text)
        if match is None:
            raise UnsupportedPtxError(
                f"line {statement.line}: {statement.text!r} is not known to the emulator"
            )
        operands = _Operands(statement, self._symbols)
        predicate = operands.register(match[2]) if match[2] else None
        _, _, text = statement.text.partition(" ") if match[2] else ("", "", statement.text)
        return Instruction(
            opcode=match[3],
            qualifiers=tuple(filter(None, match[4].split("."))),
            operands=tuple(map(operands.parse, _split(match[5]))),
            predicate=predicate,
            negated=match[1] == "!",
            line=statement.line,
            text=text.strip(),
        )


def _split(text: str) -> list[str]:
    """Splits at the commas outside brackets and braces."""
    found, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[begin:place].strip())
            begin = place + 1
    return [*found, last] if (last := text[begin:].strip()) else found


class _Operands:
    """Resolves the operands of one statement in its scopes."""

    def __init__(self, statement: _Statement, symbols: set[str]) -> None:
        self._statement = statement
        self._symbols = symbols

    def register(self, name: str) -> Register:
        for scope in reversed(self._statement.scopes):
            if name in scope.registers:
                return scope.registers[name]
        raise self._unknown(name)

    def parse(self, text: str) -> Operand:
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vector(tuple(map(self.parse, _split(text[1:-1]))))
        if text.startswith("["):
            return self._address(text[1:-1])
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.parse(first.strip()), self.parse(second.strip()))
        if text.startswith("!"):
            return Negated(self.register(text[1:].strip()))
        if not text.startswith("%") and (constant := _immediate(text)) is not None:
            return constant
        for scope in reversed(self._statement.scopes):
            if text in scope.registers:
                return scope.registers[text]
            if text in scope.vectors:
                return scope.vectors[text]
            if text in scope.labels:
                return Label(text, scope.labels[text])
        if text in self._symbols:
            return Symbol(text)
        if re.fullmatch(r"%[a-z_]\w*(\.[xyz])?", text):
            return Special(text)
        raise self._unknown(text)

    def _address(self, text: str) -> Address:
        base, *coordinates = _split(text)
        match = re.match(r"^(.*?)(?:\s*\+\s*(-?\w+)|\s*(-\w+))?$", base)
        assert match is not None
        where = self.parse(match[1].strip())
        if not isinstance(where, (Register, Symbol, Immediate)) or len(coordinates) > 1:
            raise self._unknown(f"[{text}]")
        within = self.parse(coordinates[0]) if coordinates else None
        if within is not None and not isinstance(within, Vector):
            raise self._unknown(f"[{text}]")
        return Address(where, int(match[2] or match[3] or "0", 0), within)

    def _unknown(self, part: str) -> UnsupportedPtxError:
        statement = self._statement
        return UnsupportedPtxError(
            f"line {statement.line}: {statement.text}: {part} is not known to the emulator"
        )


def _immediate(text: str) -> Immediate | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), 64)
    if re.fullmatch(r"-?\d+\.\d*([eE][+-]?\d+)?", text):
        (bits,) = struct.unpack("<Q", struct.pack("<d", float(text)))
        return Immediate(bits, 64)
    if text == "WARP_SZ":
        return Immediate(32)
    if re.fullmatch(r"-?0[0-7]+U?", text):
        return Immediate(int(text.rstrip("U"), 8))
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    return None
