"""Integer and bit instructions against Python's integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.one_instruction import evaluate

EDGES = {
    16: [0, 1, 2, 7, 15, 16, 17, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xABCD],
    32: [
        *(0, 1, 2, 31, 32, 33, 0x7FFF_FFFF, 0x8000_0000, 0x8000_0001, 0xFFFF_FFFF, 0xFFFF_FFFE),
        *(0x1234_5678, 0xDEAD_BEEF, 0x00FF_FF00, 0x0001_0000, 0xFFFF_0000),
    ],
    64: [
        *(0, 1, 2, 63, 64, 65, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1),
        *((1 << 64) - 2, 0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210, 1 << 32, (1 << 32) - 1),
    ],
}


def signed(value: int, bits: int) -> int:
    """Returns two's complement."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def rows(*widths: int) -> list[np.ndarray]:
    """Returns operands that are all combinations of edge values, and random ones."""
    # Three operands combine every second edge value, which are enough.
    step = 1 if len(widths) < 3 else 2
    columns = list(zip(*itertools.product(*(EDGES[width][::step] for width in widths))))
    random = np.random.default_rng(len(widths))
    return [
        np.concatenate(
            [
                np.array(column, f"u{width // 8}"),
                random.integers(0, 1 << width, 200, f"u{width // 8}"),
            ]
        )
        for column, width in zip(columns, widths)
    ]


def check(
    text: str, result: int, widths: tuple[int, ...], expected: Callable[..., int], kind: str = "u"
) -> None:
    """Compares an instruction with a function of integers, signed for a kind "s"."""
    operands = rows(*widths)
    found = evaluate(text, f"u{result // 8}", *operands)
    for got, *values in zip(found.tolist(), *(each.tolist() for each in operands)):
        if kind == "s":
            values = [signed(value, width) for value, width in zip(values, widths)]
        want = expected(*values) & ((1 << result) - 1)
        assert got == want, (text, values, hex(got), hex(want))


def clamp(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))


def quotient(a: int, b: int) -> int:
    """Divides as C does; by zero, all bits are set."""
    if b == 0:
        return -1
    found = abs(a) // abs(b)
    return -found if (a < 0) != (b < 0) else found


BOTH = [(sign, bits) for bits in (16, 32, 64) for sign in "us"]


@pytest.mark.parametrize(("sign", "bits"), BOTH)
def test_sums_products_and_order(sign: str, bits: int) -> None:
    kind, two = f"{sign}{bits}", (bits, bits)
    cases: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mul.hi": lambda a, b: a * b >> bits,
        "min": min,
        "max": max,
        "div": quotient,
        "rem": lambda a, b: a if b == 0 else a - quotient(a, b) * b,
    }
    for name, expected in cases.items():
        check(f"{name}.{kind} {{0}}, {{1}}, {{2}};", bits, two, expected, sign)


@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("bits", [16, 32])
def test_wide_products(sign: str, bits: int) -> None:
    check(
        f"mul.wide.{sign}{bits} {{0}}, {{1}}, {{2}};",
        2 * bits,
        (bits, bits),
        lambda a, b: a * b,
        sign,
    )
    check(
        f"mad.wide.{sign}{bits} {{0}}, {{1}}, {{2}}, {{3}};",
        2 * bits,
        (bits, bits, 2 * bits),
        lambda a, b, c: a * b + c,
        sign,
    )


def test_sums_of_products() -> None:
    three = (32, 32, 32)
    check("mad.lo.s32 {0}, {1}, {2}, {3};", 32, three, lambda a, b, c: a * b + c, "s")
    check("mad.hi.u32 {0}, {1}, {2}, {3};", 32, three, lambda a, b, c: (a * b >> 32) + c)
    check(
        "mad.hi.sat.s32 {0}, {1}, {2}, {3};",
        32,
        three,
        lambda a, b, c: clamp((a * b >> 32) + c, -(1 << 31), (1 << 31) - 1),
        "s",
    )
    for part, shift in (("lo", 0), ("hi", 16)):
        check(
            f"mul24.{part}.s32 {{0}}, {{1}}, {{2}};",
            32,
            (32, 32),
            lambda a, b, shift=shift: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24) >> shift,
            "s",
        )
        check(
            f"mul24.{part}.u32 {{0}}, {{1}}, {{2}};",
            32,
            (32, 32),
            lambda a, b, shift=shift: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> shift,
        )


def test_saturated_sums() -> None:
    for name, expected in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        check(
            f"{name}.sat.s32 {{0}}, {{1}}, {{2}};",
            32,
            (32, 32),
            lambda a, b, exact=expected: clamp(exact(a, b), -(1 << 31), (1 << 31) - 1),
            "s",
        )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_signs(bits: int) -> None:
    check(f"neg.s{bits} {{0}}, {{1}};", bits, (bits,), lambda a: -a, "s")
    check(f"abs.s{bits} {{0}}, {{1}};", bits, (bits,), abs, "s")


def test_carries_cross_words() -> None:
    text = (
        "{{ .reg .b32 l0, h0, l1, h1; mov.b64 {{l0, h0}}, {1}; mov.b64 {{l1, h1}}, {2};"
        "%s.cc.u32 l0, l0, l1; %sc.u32 h0, h0, h1; mov.b64 {0}, {{l0, h0}}; }}"
    )
    check(text % ("add", "add"), 64, (64, 64), lambda a, b: a + b)
    check(text % ("sub", "sub"), 64, (64, 64), lambda a, b: a - b)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits: int) -> None:
    two, mask = (bits, bits), (1 << bits) - 1
    check(f"and.b{bits} {{0}}, {{1}}, {{2}};", bits, two, lambda a, b: a & b)
    check(f"or.b{bits} {{0}}, {{1}}, {{2}};", bits, two, lambda a, b: a | b)
    check(f"xor.b{bits} {{0}}, {{1}}, {{2}};", bits, two, lambda a, b: a ^ b)
    check(f"not.b{bits} {{0}}, {{1}};", bits, (bits,), lambda a: ~a)
    check(f"cnot.b{bits} {{0}}, {{1}};", bits, (bits,), lambda a: int(a == 0))
    by = (bits, 32)
    check(f"shl.b{bits} {{0}}, {{1}}, {{2}};", bits, by, lambda a, b: a << min(b, bits) & mask)
    check(f"shr.u{bits} {{0}}, {{1}}, {{2}};", bits, by, lambda a, b: a >> min(b, bits))
    check(f"shr.b{bits} {{0}}, {{1}}, {{2}};", bits, by, lambda a, b: a >> min(b, bits))
    check(
        f"shr.s{bits} {{0}}, {{1}}, {{2}};",
        bits,
        by,
        lambda a, b: signed(a, bits) >> min(b, bits),
    )
    for amount in (0, 1, bits - 1, bits, bits + 1):
        check(f"shl.b{bits} {{0}}, {{1}}, {amount};", bits, (bits,), lambda a, n=amount: a << n)
        check(
            f"shr.s{bits} {{0}}, {{1}}, {amount};", bits, (bits,), lambda a, n=amount: a >> n, "s"
        )


def test_funnel_shifts() -> None:
    def shifted(low: int, high: int, amount: int, left: bool) -> int:
        both = high << 32 | low
        return both << amount >> 32 if left else both >> amount

    for direction in "lr":
        for mode in ("wrap", "clamp"):
            check(
                f"shf.{direction}.{mode}.b32 {{0}}, {{1}}, {{2}}, {{3}};",
                32,
                (32, 32, 32),
                lambda a, b, c, d=direction, m=mode: shifted(
                    a, b, c & 31 if m == "wrap" else min(c, 32), d == "l"
                ),
            )


@pytest.mark.parametrize("table", [0x00, 0xFF, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1B])
def test_any_logic_of_three(table: int) -> None:
    def expected(a: int, b: int, c: int) -> int:
        found = 0
        for bit in range(32):
            index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
            found |= (table >> index & 1) << bit
        return found

    check(f"lop3.b32 {{0}}, {{1}}, {{2}}, {{3}}, {table:#x};", 32, (32, 32, 32), expected)


def test_permuted_bytes() -> None:
    def picked(a: int, b: int, selector: int) -> int:
        pool = (a | b << 32).to_bytes(8, "little")
        found = []
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = pool[nibble & 7]
            found.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(found), "little")

    check("prmt.b32 {0}, {1}, {2}, {3};", 32, (32, 32, 32), picked)
    # Tables of the PTX ISA, from the high byte on.
    tables = {
        "f4e": ("3210", "4321", "5432", "6543"),
        "b4e": ("5670", "6701", "7012", "0123"),
        "rc8": ("0000", "1111", "2222", "3333"),
        "ecl": ("3210", "3211", "3222", "3333"),
        "ecr": ("0000", "1110", "2210", "3210"),
        "rc16": ("1010", "3232", "1010", "3232"),
    }
    for mode, table in tables.items():
        check(
            f"prmt.b32.{mode} {{0}}, {{1}}, {{2}}, {{3}};",
            32,
            (32, 32, 32),
            lambda a, b, c, table=table: picked(a, b, int(table[c & 3], 16)),
        )


@pytest.mark.parametrize(("sign", "bits"), [(sign, bits) for bits in (32, 64) for sign in "us"])
def test_extracted_fields(sign: str, bits: int) -> None:
    def expected(a: int, position: int, length: int) -> int:
        # Literally as the PTX ISA describes it, bit by bit.
        position, length, last = position & 255, length & 255, bits - 1
        fill = 0 if sign == "u" or length == 0 else a >> min(position + length - 1, last) & 1
        return sum(
            (a >> (position + bit) & 1 if bit < length and position + bit <= last else fill) << bit
            for bit in range(bits)
        )

    check(f"bfe.{sign}{bits} {{0}}, {{1}}, {{2}}, {{3}};", bits, (bits, 32, 32), expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_inserted_fields(bits: int) -> None:
    def expected(a: int, b: int, position: int, length: int) -> int:
        position, length = position & 255, length & 255
        for bit in range(length):
            if position + bit < bits:
                b = b & ~(1 << (position + bit)) | (a >> bit & 1) << (position + bit)
        return b

    operands = [each[:400] for each in rows(bits, bits)]
    random = np.random.default_rng(1)
    positions = random.integers(0, 80, len(operands[0]), np.uint32)
    lengths = random.integers(0, 80, len(operands[0]), np.uint32)
    lengths[::7] += 256
    found = evaluate(
        f"bfi.b{bits} {{0}}, {{1}}, {{2}}, {{3}}, {{4}};",
        f"u{bits // 8}",
        *operands,
        positions,
        lengths,
    )
    values = zip(*(each.tolist() for each in (*operands, positions, lengths)))
    assert found.tolist() == [expected(*each) for each in values]


@pytest.mark.parametrize("bits", [32, 64])
def test_counted_bits(bits: int) -> None:
    one = (bits,)
    check(f"popc.b{bits} {{0}}, {{1}};", 32, one, lambda a: bin(a).count("1"))
    check(f"clz.b{bits} {{0}}, {{1}};", 32, one, lambda a: bits - a.bit_length())
    check(f"brev.b{bits} {{0}}, {{1}};", bits, one, lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    check(f"bfind.u{bits} {{0}}, {{1}};", 32, one, lambda a: a.bit_length() - 1)

    def highest(a: int) -> int:
        return (a if a >= 0 else ~a).bit_length() - 1

    check(f"bfind.s{bits} {{0}}, {{1}};", 32, one, highest, "s")
    check(
        f"bfind.shiftamt.s{bits} {{0}}, {{1}};",
        32,
        one,
        lambda a: -1 if highest(a) < 0 else bits - 1 - highest(a),
        "s",
    )


def test_dot_products() -> None:
    def dot(a: int, b: int, c: int, signs: tuple[bool, bool]) -> int:
        for byte in range(4):
            x, y = a >> 8 * byte & 255, b >> 8 * byte & 255
            c += (signed(x, 8) if signs[0] else x) * (signed(y, 8) if signs[1] else y)
        return c

    for first, second in itertools.product("us", "us"):
        check(
            f"dp4a.{first}32.{second}32 {{0}}, {{1}}, {{2}}, {{3}};",
            32,
            (32, 32, 32),
            lambda a, b, c, signs=(first == "s", second == "s"): dot(a, b, c, signs),
        )


def test_differences_masks_and_pairs() -> None:
    check("sad.s32 {0}, {1}, {2}, {3};", 32, (32, 32, 32), lambda a, b, c: abs(a - b) + c, "s")
    check("sad.u32 {0}, {1}, {2}, {3};", 32, (32, 32, 32), lambda a, b, c: abs(a - b) + c)
    check(
        "bmsk.clamp.b32 {0}, {1}, {2};",
        32,
        (32, 32),
        lambda a, b: ((1 << min(b, 32)) - 1) << a if a < 32 else 0,
    )
    check(
        "bmsk.wrap.b32 {0}, {1}, {2};",
        32,
        (32, 32),
        lambda a, b: ((1 << (b & 31)) - 1) << (a & 31),
    )
    check(
        "szext.clamp.s32 {0}, {1}, {2};",
        32,
        (32, 32),
        lambda a, b: 0 if b == 0 else signed(a & ((1 << min(b, 32)) - 1), min(b, 32)),
    )
    check(
        "add.u16x2 {0}, {1}, {2};",
        32,
        (32, 32),
        lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16,
    )
    check(
        "max.s16x2 {0}, {1}, {2};",
        32,
        (32, 32),
        lambda a, b: sum(
            (max(signed(a >> s & 0xFFFF, 16), signed(b >> s & 0xFFFF, 16)) & 0xFFFF) << s
            for s in (0, 16)
        ),
    )
