"""Reads a launcher's Arm host code: the launch, and the processor it needs.

Instructions have 32 bits; encodings follow the Arm Architecture Reference Manual for A-profile,
chapter C4. An encoding here is a value and the mask under which an instruction has it.
`launch_code` does the same for x86-64, and describes the evidence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

_Encoding = tuple[int, int]

_MOVE_WIDE: _Encoding = (0x12800000, 0x1F800000)
_MOVN, _MOVZ, _MOVK = 0, 2, 3
_OR_IMMEDIATE: _Encoding = (0x320003E0, 0x7F8003E0)
"""ORR with the zero register and a repeated-bit constant, which moves such constants."""

_MOVE_VECTOR: _Encoding = (0x0F000400, 0xBFF89C00)
"""MOVI of two or four equal 32-bit elements, which have 8 bits anywhere and zeros elsewhere."""

_STORES = (
    (0xF9000000, 0xFFC00000),
    (0xF8000000, 0xFFE00000),
    (0xF8200800, 0xFFE00C00),
)
"""STR for an X register: by an offset; before or after it, or unscaled; by a register."""

_VECTOR_STORES = (
    (0xFD000000, 0xFFC00000),
    (0xFC000000, 0xFFE00000),
    (0x3D800000, 0xFFC00000),
    (0x3C800000, 0xFFE00000),
)
"""STR for a D register and a Q register, by an offset and otherwise."""

_PAIR_STORES = ((0xA8000000, 0xFE400000),)
_VECTOR_PAIR_STORES = ((0x6C000000, 0xFE400000), (0xAC000000, 0xFE400000))
"""STP for X registers; STP for D and Q registers."""

_WRITES_NO_REGISTER = (
    (0x39000000, 0x3BC00000),
    (0x38000000, 0x3BE00000),
    (0x28000000, 0x7E400000),
    (0x14000000, 0xFC000000),
    (0x54000000, 0xFE000000),
    (0x34000000, 0x7E000000),
    (0x36000000, 0x7E000000),
)
"""Stores with other widths, then branches: the register in their lowest five bits is not
written."""

_CALLS = ((0x94000000, 0xFC000000), (0xD63F0000, 0xFFFFFC1F))
"""BL and BLR, after which vector registers and registers 0 to 18 hold anything."""

_PAIR_LOADS = ((0x28400000, 0x3E400000), (0x08600000, 0x3FE00000))
_VECTOR_PAIR_LOADS = ((0x2C400000, 0x3E400000),)
"""LDP and LDPSW, then LDXP and LDAXP; LDP for vector registers. They write two registers."""

_MOVES_BETWEEN_KINDS = (
    (0x1E000000, 0x5F000000),
    (0x0E003C00, 0xBFE0FC00),
    (0x0E002C00, 0xBFE0FC00),
)
"""FMOV and conversions between vector and other registers, UMOV, SMOV. The written kind is not
decoded: both are forgotten."""

_VECTOR_INSTRUCTIONS = ((0x0E000000, 0x0E000000), (0x0C000000, 0x0E000000))
"""Vector arithmetic, loads and stores."""

_ZERO_REGISTER = 31
_FIRST_PRESERVED = 19

_EXTENSIONS = (
    ("SVE", (0x04000000, 0x1E000000)),
    ("SME", (0x80000000, 0x9E000000)),
    ("LSE atomics", (0x38200000, 0x3F200C00)),
    ("LSE atomics", (0x08A07C00, 0x3FA07C00)),
    ("LSE atomics", (0x08207C00, 0xBFA07C00)),
)
"""Extensions beyond Armv8.0-A, with their instructions: all of SVE and SME; for the atomics, LD<op>
with SWP, CAS, and CASP."""


def stored_constants(code: bytes) -> set[int]:
    """Returns the 64-bit constants that the code stores.

    Instructions are followed in file order, as if no branch were taken. A register's known value is
    forgotten when another instruction writes it, but not at a function's end.
    """
    registers = _Registers()
    return {value for word in _words(code) for value in registers.follow(word)}


def extension(code: bytes) -> str | None:
    """Returns a processor extension beyond Armv8.0-A that the launcher shows signs of, or None.

    As on x86-64, a sign proves that the code needs such a processor, and the absence of signs
    proves nothing: other extensions pass unseen.
    """
    words = {*_words(code)}
    for name, encoding in _EXTENSIONS:
        if any(_has(word, encoding) for word in words):
            return name
    return None


def _words(code: bytes) -> Iterator[int]:
    return (word for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4]))


def _has(word: int, *encodings: _Encoding) -> bool:
    return any(word & mask == value for value, mask in encodings)


@dataclass
class _Registers:
    """Known register contents by number: 64-bit registers, and halves of vectors."""

    plain: dict[int, int] = field(default_factory=dict)
    vectors: dict[int, int] = field(default_factory=dict)

    def follow(self, word: int) -> list[int]:
        """Follows an instruction and returns the known constants that it stores."""
        first, second = word & 31, word >> 10 & 31
        if _has(word, _MOVE_WIDE):
            self._move_wide(word)
        elif _has(word, _OR_IMMEDIATE):
            self.plain[first] = _repeated_bits(word)
        elif _has(word, _MOVE_VECTOR):
            self.vectors[first] = _moved_elements(word)
        elif _has(word, *_STORES):
            return _known(self.plain, first)
        elif _has(word, *_PAIR_STORES):
            return _known(self.plain, first, second)
        elif _has(word, *_VECTOR_STORES):
            return _known(self.vectors, first)
        elif _has(word, *_VECTOR_PAIR_STORES):
            return _known(self.vectors, first, second)
        elif _has(word, *_CALLS):
            self.vectors.clear()
            self.plain = {
                number: value for number, value in self.plain.items() if number >= _FIRST_PRESERVED
            }
        elif _has(word, *_PAIR_LOADS):
            _forget(self.plain, first, second)
        elif _has(word, *_VECTOR_PAIR_LOADS):
            _forget(self.vectors, first, second)
        elif _has(word, *_MOVES_BETWEEN_KINDS):
            _forget(self.plain, first)
            _forget(self.vectors, first)
        elif not _has(word, *_WRITES_NO_REGISTER):
            written = self.vectors if _has(word, *_VECTOR_INSTRUCTIONS) else self.plain
            written.pop(first, None)
        self.plain.pop(_ZERO_REGISTER, None)  # reads as zero; writes to it are dropped
        return []

    def _move_wide(self, word: int) -> None:
        """Follows MOVZ, MOVN or MOVK: sets 16 bits at one of four positions."""
        register, kind, shift = word & 31, word >> 29 & 3, (word >> 21 & 3) * 16
        bits, all_bits = (word >> 5 & 0xFFFF) << shift, (1 << _width(word)) - 1
        if kind == _MOVZ:
            self.plain[register] = bits & all_bits
        elif kind == _MOVN:
            self.plain[register] = ~bits & all_bits
        elif kind == _MOVK and register in self.plain:
            other_bits = self.plain[register] & ~(0xFFFF << shift)
            self.plain[register] = (other_bits | bits) & all_bits
        else:
            self.plain.pop(register, None)


def _forget(registers: dict[int, int], *numbers: int) -> None:
    for number in numbers:
        registers.pop(number, None)


def _known(registers: dict[int, int], *numbers: int) -> list[int]:
    return [registers[number] for number in numbers if number in registers]


def _width(word: int) -> int:
    return 64 if word >> 31 else 32


def _repeated_bits(word: int) -> int:
    """Returns a logical instruction's constant: a rotated run of ones, repeated to its width."""
    ones, rotation = word >> 10 & 63, word >> 16 & 63
    size = 1 << (((word >> 22 & 1) << 6 | ~ones & 63).bit_length() - 1)
    run, shift = (1 << ((ones & (size - 1)) + 1)) - 1, rotation & (size - 1)
    rotated = (run >> shift | run << (size - shift)) & ((1 << size) - 1)
    return sum(rotated << start for start in range(0, _width(word), size))


def _moved_elements(word: int) -> int:
    """Returns two MOVI elements, side by side."""
    element = ((word >> 16 & 7) << 5 | word >> 5 & 31) << (word >> 13 & 3) * 8
    return element << 32 | element
