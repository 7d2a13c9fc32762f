"""Reads from the Arm host code of a kernel, its launcher: the launch, and the processor it needs.

Instructions are of 32 bits each; their encodings are those of the Arm Architecture Reference Manual
for A-profile, chapter C4. `launch_code` does the same for x86-64, and says what is looked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MOVE_WIDE, _MOVE_WIDE_MASK = 0x12800000, 0x1F800000
_MOVN, _MOVZ, _MOVK = 0, 2, 3
_OR_IMMEDIATE, _OR_IMMEDIATE_MASK = 0x320003E0, 0x7F8003E0
"""ORR with the zero register and a constant of repeated bits: how such constants are moved."""

_CALLS = ((0x94000000, 0xFC000000), (0xD63F0000, 0xFFFFFC1F))
"""BL and BLR, behind which registers 0 to 18 hold anything."""

_BRANCHES = (
    (0x14000000, 0xFC000000),
    (0x54000000, 0xFE000000),
    (0x34000000, 0x7E000000),
    (0x36000000, 0x7E000000),
)
"""Instructions whose lowest five bits name no register that they write."""

_STORES_64 = (
    (0xF9000000, 0xFFC00000),
    (0xF8000000, 0xFFE00000),
    (0xF8200800, 0xFFE00C00),
)
"""STR of an X register, by an offset, before or after it, or by a register."""

_PAIR_STORE_64, _PAIR_STORE_64_MASK = 0xA8000000, 0xFE400000
_OTHER_STORES = ((0x39000000, 0x3BC00000), (0x38000000, 0x3BE00000), (0x28000000, 0x7E400000))
"""Stores of other widths and of vector registers, which change no X register."""

_ZERO = 31
_FIRST_KEPT = 19

_EXTENSIONS = (
    ("SVE", 0x04000000, 0x1E000000),
    ("SME", 0x80000000, 0x9E000000),
    ("LSE atomics", 0x38200000, 0x3F200C00),
    ("LSE atomics", 0x08A07C00, 0x3FA07C00),
    ("LSE atomics", 0x08207C00, 0xBFA07C00),
)
"""What Armv8.0-A lacks, with the instructions that show it: all of SVE and SME; LD<op> and SWP, CAS,
and CASP."""


def stored_constants(code: bytes) -> Iterator[int]:
    """The constants of 64 bits that the code stores, in order.

    Instructions are followed in the order in which they stand, as if no branch were taken: what a
    register is known to hold is forgotten where anything else writes it.
    """
    known: dict[int, int] = {}
    for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4]):
        register = word & 31
        if word & _MOVE_WIDE_MASK == _MOVE_WIDE:
            _move_wide(word, known)
        elif word & _OR_IMMEDIATE_MASK == _OR_IMMEDIATE:
            known[register] = _repeated_bits(word)
        elif _is_one_of(word, _STORES_64):
            if register in known:
                yield known[register]
        elif word & _PAIR_STORE_64_MASK == _PAIR_STORE_64:
            yield from (known[one] for one in (register, word >> 10 & 31) if one in known)
        elif _is_one_of(word, _CALLS):
            known = {one: value for one, value in known.items() if one >= _FIRST_KEPT}
        elif not _is_one_of(word, (*_OTHER_STORES, *_BRANCHES)):
            known.pop(register, None)
        known.pop(_ZERO, None)


def extension(code: bytes) -> str | None:
    """Extension beyond Armv8.0-A, which every such processor has, that the launcher shows signs of.

    As of x86-64, a sign proves that the code needs such a processor, and the absence of signs
    proves nothing: other extensions pass unseen.
    """
    words = [word for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4])]
    for name, value, mask in _EXTENSIONS:
        if any(word & mask == value for word in words):
            return name
    return None


def _is_one_of(word: int, patterns: tuple[tuple[int, int], ...]) -> bool:
    return any(word & mask == value for value, mask in patterns)


def _move_wide(word: int, known: dict[int, int]) -> None:
    """MOVZ, MOVN or MOVK: 16 bits of a register, at one of four places, with or without the rest."""
    register, kind, shift = word & 31, word >> 29 & 3, (word >> 21 & 3) * 16
    width = 64 if word >> 31 else 32
    bits, everything = (word >> 5 & 0xFFFF) << shift, (1 << width) - 1
    if kind == _MOVZ:
        known[register] = bits & everything
    elif kind == _MOVN:
        known[register] = ~bits & everything
    elif kind == _MOVK and register in known:
        known[register] = (known[register] & ~(0xFFFF << shift) | bits) & everything
    else:
        known.pop(register, None)


def _repeated_bits(word: int) -> int:
    """The constant of a logical instruction: a rotated run of ones, repeated over the register."""
    width = 64 if word >> 31 else 32
    ones, rotation = word >> 10 & 63, word >> 16 & 63
    size = 1 << ((word >> 22 & 1) << 6 | ~ones & 63).bit_length() - 1
    run = (1 << (ones & size - 1) + 1) - 1
    places = rotation & size - 1
    rotated = (run >> places | run << size - places) & (1 << size) - 1
    return sum(rotated << start for start in range(0, width, size))
