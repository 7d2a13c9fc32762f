"""Floating-point arithmetic against exact fractions, rounded by looking at both neighbours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.support.one_instruction import evaluate

EDGES32 = np.array(
    [
        0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x40490FDB, 0x7F7FFFFF, 0xFF7FFFFF,
        0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F800000, 0xFF800000,
        0x7FC00000, 0xFFC12345, 0x7F800001, 0x3F800001, 0x33800000, 0xB3800001, 0x4B800000,
        0x4B7FFFFF, 0x1A2B3C4D, 0xC2F6E979, 0x34000000, 0x3EAAAAAB, 0x7E967699, 0x0DA24260,
    ],
    np.uint32,
)  # fmt: skip
EDGES16 = np.array(
    [
        0x0000, 0x8000, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7C00,
        0xFC00, 0x7E00, 0xFE01, 0x3C01, 0x1001, 0x5555, 0xB555, 0x3F80, 0xBF80, 0x7F7F, 0x7F80,
        0x0080, 0x4049,
    ],
    np.uint16,
)  # fmt: skip

F32, F64 = np.float32, np.float64


class Format:
    """A binary format: bits of its significand, its least exponent, its overflow."""

    def __init__(self, precision: int, least: int, most: int) -> None:
        self.precision, self.least, self.most = precision, least, most

    def round(self, value: Fraction, mode: str) -> float | None:
        """Rounds a fraction that is not 0; None for a zero, whose sign is the caller's."""
        size = abs(value)
        exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
        exponent += (size >= Fraction(2) ** (exponent + 1)) - (size < Fraction(2) ** exponent)
        unit = Fraction(2) ** max(exponent - self.precision + 1, self.least)
        below, above = math.floor(value / unit) * unit, math.ceil(value / unit) * unit
        if mode == "rn":
            if value - below == above - value:
                found = below if (below / unit) % 2 == 0 else above
            else:
                found = below if value - below < above - value else above
        elif mode == "rz":
            found = below if value > 0 else above
        else:
            found = below if mode == "rm" else above
        limit = Fraction(2) ** self.most
        if abs(found) >= limit:
            largest = limit - limit / 2**self.precision
            if mode == "rz" or (mode == "rm" and found > 0) or (mode == "rp" and found < 0):
                return float(largest if found > 0 else -largest)
            return math.inf if found > 0 else -math.inf
        return float(found) if found else None


SINGLE, DOUBLE = Format(24, -149, 128), Format(53, -1074, 1024)
HALF, BRAIN = Format(11, -24, 16), Format(8, -133, 128)


def special(name: str, values: tuple[float, ...], mode: str) -> float | None:
    """Returns the results that fractions cannot give: NaN, infinities and zeros."""
    with np.errstate(all="ignore"):
        wide = [F64(value) for value in values]
        found = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "div": lambda a, b: a / b,
            "fma": lambda a, b, c: a * b + c,
        }[name](*wide)
    if any(not math.isfinite(value) for value in values) or not math.isfinite(found):
        return float(found)
    return None


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}


def expected(name: str, values: tuple[float, ...], mode: str, format: Format) -> float:
    """Returns the correctly rounded result."""
    if name == "div" and values[1] == 0 and math.isfinite(values[0]):
        with np.errstate(all="ignore"):
            return float(F64(values[0]) / F64(values[1]))
    if any(not math.isfinite(value) for value in values):
        return float(special(name, values, mode))
    exact = EXACT[name](*map(Fraction, values))
    signs = [math.copysign(1, value) for value in values]
    if exact == 0:
        if name in ("mul", "div"):
            return math.copysign(0.0, signs[0] * signs[1])
        first = signs[0] if name != "fma" else signs[0] * signs[1]
        second = signs[-1] if name != "sub" else -signs[-1]
        if first == second:
            return math.copysign(0.0, first)
        return -0.0 if mode == "rm" else 0.0
    found = format.round(exact, mode)
    return math.copysign(0.0, exact) if found is None else found


def same(found: float, wanted: float) -> bool:
    """Whether two numbers are equal, with the signs of zeros, or both NaN."""
    if math.isnan(wanted):
        return math.isnan(found)
    return found == wanted and math.copysign(1, found) == math.copysign(1, wanted)


def combined(edges: np.ndarray, count: int, random: int = 300) -> list[np.ndarray]:
    """Returns operands that are all combinations of edge values, and random bits."""
    draw = np.random.default_rng(count)
    some = edges if count < 3 else edges[:: 2 if len(edges) > 24 else 1][:13]
    columns = np.array(list(itertools.product(some.tolist(), repeat=count)), edges.dtype)
    extra = draw.integers(0, 1 << (8 * edges.itemsize), (random, count), edges.dtype)
    # Random bits with exponents near each other, where sums cancel and round.
    near = draw.integers(0, 1 << 24, (random, count), np.uint32) | np.uint32(0x3F000000)
    near = near if edges.itemsize == 4 else near >> 12
    rows = np.concatenate([columns, extra, near.astype(edges.dtype)])
    return [np.ascontiguousarray(column) for column in rows.T]


def compare(text: str, name: str, mode: str, operands: list[np.ndarray]) -> None:
    found = evaluate(text, np.uint32, *operands).view(F32)
    for row, values in enumerate(zip(*(each.view(F32).tolist() for each in operands))):
        want = expected(name, values, mode, SINGLE)
        assert same(float(found[row]), want), (text, values, float(found[row]), want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_f32_is_rounded_once(name: str, mode: str) -> None:
    compare(f"{name}.{mode}.f32 {{0}}, {{1}}, {{2}};", name, mode, combined(EDGES32, 2))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f32_fma_is_rounded_once(mode: str) -> None:
    compare(f"fma.{mode}.f32 {{0}}, {{1}}, {{2}}, {{3}};", "fma", mode, combined(EDGES32, 3))


def test_f32_fma_where_two_roundings_differ() -> None:
    # 1 + 2**-24 + 2**-60 rounds up; through float64, the last term is lost and the tie goes down.
    a = np.array([2.0**-30, -(2.0**-30), 2.0**-30], F32)
    b = np.array([2.0**-30, 2.0**-30, 2.0**-30], F32)
    c = np.array([1 + 2.0**-23, 1.0, -1.0], F32)
    tie = evaluate(
        "{{ .reg .b32 t; fma.rn.f32 t, {1}, {2}, {3}; mov.b32 {0}, t; }}",
        np.uint32,
        *(each.view(np.uint32) for each in (a, b, c)),
    ).view(F32)
    assert tie.tolist() == c.tolist()
    x = np.array([1 + 2.0**-12], F32)
    y = np.array([1 + 2.0**-12], F32)
    z = np.array([2.0**-60], F32)
    found = evaluate(
        "fma.rn.f32 {0}, {1}, {2}, {3};", np.uint32, *(v.view(np.uint32) for v in (x, y, z))
    ).view(F32)
    exact = Fraction(float(x[0])) ** 2 + Fraction(float(z[0]))
    assert float(found[0]) == SINGLE.round(exact, "rn")
    assert float(found[0]) != float(F32(float(x[0]) * float(y[0]) + float(z[0])))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "mul", "div", "fma"])
def test_f64_is_rounded_once(name: str, mode: str) -> None:
    count = 3 if name == "fma" else 2
    edges = np.array(
        [0.0, -0.0, 1.0, -1.0, 1 / 3, 5e-324, 2.0**-1022, 1.7e308, -1.7e308, 1e-200, math.inf,
         math.nan, 1 + 2.0**-52, 2.0**-53],
        F64,
    )  # fmt: skip
    rows = np.array(list(itertools.product(edges[: 14 if count < 3 else 9].tolist(), repeat=count)))
    operands = [np.ascontiguousarray(column) for column in rows.T]
    found = evaluate(
        f"{name}.{mode}.f64 " + ", ".join(f"{{{place}}}" for place in range(count + 1)) + ";",
        np.uint64,
        *(each.view(np.uint64) for each in operands),
    ).view(F64)
    for row, values in enumerate(zip(*(each.tolist() for each in operands))):
        want = expected(name, values, mode, DOUBLE)
        assert same(float(found[row]), want), (name, mode, values, float(found[row]), want)


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(F32)


def f16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(F32)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize(("kind", "widen", "format"), [("f16", f16, HALF), ("bf16", bf16, BRAIN)])
def test_half_precision_is_rounded_once(
    kind: str, widen: Callable[[np.ndarray], np.ndarray], format: Format, name: str
) -> None:
    count = 3 if name == "fma" else 2
    operands = combined(EDGES16, count)
    rounding = ".rn" if name == "fma" else ""
    places = ", ".join(f"{{{place}}}" for place in range(count + 1))
    found = widen(evaluate(f"{name}{rounding}.{kind} {places};", np.uint16, *operands))
    packed = evaluate(
        f"{name}{rounding}.{kind}x2 {places};",
        np.uint32,
        *(each.astype(np.uint32) | (each.astype(np.uint32) << 16) for each in operands),
    )
    for half in (packed & 0xFFFF, packed >> 16):
        assert np.array_equal(widen(half.astype(np.uint16)), found, equal_nan=True)
    for row, values in enumerate(zip(*(widen(each).tolist() for each in operands))):
        want = expected(name, values, "rn", format)
        assert same(float(found[row]), want), (kind, name, values, float(found[row]), want)


def bits(*values: float) -> np.ndarray:
    return np.array(values, F32).view(np.uint32)


def single(text: str, *operands: np.ndarray) -> list[float]:
    return evaluate(text, np.uint32, *operands).view(F32).tolist()


def test_pairs_of_f32() -> None:
    low, high = combined(EDGES32, 2)
    pairs = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    other = pairs[::-1].copy()
    for name, count in (("add", 2), ("mul", 2), ("fma", 3)):
        for mode in ("rn", "rz"):
            operands = [pairs, other, pairs][:count]
            places = ", ".join(f"{{{place}}}" for place in range(count + 1))
            found = evaluate(f"{name}.{mode}.f32x2 {places};", np.uint64, *operands)
            for part in (0, 1):
                halves = [each.view(np.uint32)[part::2].copy() for each in operands]
                alone = evaluate(f"{name}.{mode}.f32 {places};", np.uint32, *halves)
                assert np.array_equal(found.view(np.uint32)[part::2], alone)


def test_ftz_makes_subnormals_zero_with_their_sign() -> None:
    tiny, least = bits(1e-40, -1e-40, 2.0**-126), bits(1.0, 1.0, 0.5)
    assert single("mul.ftz.f32 {0}, {1}, {2};", tiny, least) == [0.0, -0.0, 0.0]
    found = single("add.ftz.f32 {0}, {1}, {1};", tiny)
    assert [math.copysign(1, each) for each in found] == [1, -1, 1]
    assert found[2] == 2.0**-125
    assert single("mul.f32 {0}, {1}, {2};", tiny, least)[2] == 2.0**-127


@pytest.mark.parametrize(("name", "power"), [("rcp", 1), ("rsqrt", 2)])
def test_ftz_keeps_the_normal_numbers_of_f64(name: str, power: int) -> None:
    found = evaluate(
        f"{name}.approx.ftz.f64 {{0}}, {{1}};", np.float64, np.array([2.0**-200, 1e-310])
    )
    assert found[:2].tolist() == [2.0 ** (200 // power), math.inf]


def test_saturation_and_relu() -> None:
    values = bits(-1.0, 0.25, 2.0, math.nan, -math.inf, math.inf)
    one = bits(*[1.0] * 6)
    assert single("mul.sat.f32 {0}, {1}, {2};", values, one) == [0, 0.25, 1, 0, 0, 1]
    assert single("fma.rn.sat.f32 {0}, {1}, {2}, {1};", values, bits(*[0.0] * 6))[:3] == [
        0,
        0.25,
        1,
    ]
    halves = np.array([0xBC00, 0x3C00, 0x7E00], np.uint16)
    found = evaluate("fma.rn.relu.f16 {0}, {1}, {1}, {1};", np.uint16, halves)
    assert found.tolist() == [0, 0x4000, 0x7FFF]
    minus = np.array([0x3C00] * 3, np.uint16)
    found = evaluate(
        "{{ .reg .b16 t; neg.f16 t, {2}; fma.rn.relu.f16 {0}, {2}, t, t; }}",
        np.uint16,
        halves,
        minus,
    )
    assert found.tolist() == [0, 0, 0]


def test_mixed_sums_widen_the_narrow_operand() -> None:
    wide = bits(1.0, 1e-3, math.inf)
    narrow = np.array([0x3F80, 0x4049, 0x3F80], np.uint16)
    found = single("add.rn.f32.bf16 {0}, {2}, {1};", wide, narrow)
    assert found == [2.0, float(F32(1e-3) + F32(3.140625)), math.inf]
    found = single("fma.rn.f32.bf16 {0}, {2}, {2}, {1};", wide, narrow)
    assert found[:2] == [2.0, float(F32(3.140625**2 + float(F32(1e-3))))]


def test_order_with_nan_and_signed_zeros() -> None:
    a = bits(math.nan, 1.0, math.nan, 0.0, -0.0, -3.0)
    b = bits(1.0, math.nan, math.nan, -0.0, 0.0, 2.0)
    least = single("min.f32 {0}, {1}, {2};", a, b)
    assert least[:2] == [1.0, 1.0]
    assert math.isnan(least[2])
    assert [math.copysign(1, each) for each in least[3:5]] == [-1, -1]
    most = single("max.f32 {0}, {1}, {2};", a, b)
    assert [math.copysign(1, each) for each in most[3:5]] == [1, 1]
    assert all(map(math.isnan, single("max.NaN.f32 {0}, {1}, {2};", a, b)[:3]))
    assert single("max.xorsign.abs.f32 {0}, {1}, {2};", a, b)[5] == -3.0
    assert single("max.f32 {0}, {1}, {2}, {1};", b, a)[5] == 2.0
    halves = np.array([0x7E00, 0x0000, 0xC000], np.uint16)
    others = np.array([0x3C00, 0x8000, 0x3C00], np.uint16)
    assert evaluate("min.f16 {0}, {1}, {2};", np.uint16, halves, others).tolist() == [
        0x3C00, 0x8000, 0xC000,
    ]  # fmt: skip
    assert evaluate("max.NaN.bf16 {0}, {1}, {2};", np.uint16, np.array([0x7FC0], np.uint16),
                    np.array([0x3F80], np.uint16)).tolist() == [0x7FFF]  # fmt: skip


def test_signs_change_bits_only() -> None:
    values = EDGES32[~np.isnan(EDGES32.view(F32))]
    assert np.array_equal(evaluate("neg.f32 {0}, {1};", np.uint32, values), values ^ 0x80000000)
    assert np.array_equal(evaluate("abs.f32 {0}, {1};", np.uint32, values), values & 0x7FFFFFFF)
    pair = np.array([0x3C00BC00], np.uint32)
    assert evaluate("neg.bf16x2 {0}, {1};", np.uint32, pair).tolist() == [0xBC003C00]
    assert evaluate("abs.f16x2 {0}, {1};", np.uint32, pair).tolist() == [0x3C003C00]
    found = single("copysign.f32 {0}, {1}, {2};", bits(-1.0, 1.0), bits(5.0, -6.0))
    assert found == [-5.0, 6.0]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_roots_and_reciprocals_are_rounded_once(mode: str) -> None:
    (values,) = combined(EDGES32, 1)
    numbers = values.view(F32).tolist()
    for row, found in enumerate(single(f"rcp.{mode}.f32 {{0}}, {{1}};", values)):
        assert same(found, expected("div", (1.0, numbers[row]), mode, SINGLE)), numbers[row]
    for number, found in zip(numbers, single(f"sqrt.{mode}.f32 {{0}}, {{1}};", values)):
        if number > 0 and math.isfinite(number):
            exact = Fraction(number)
            below = Fraction(float(np.nextafter(F32(found), F32(-1)))) if found else Fraction(0)
            above = Fraction(float(np.nextafter(F32(found), F32(math.inf))))
            here = Fraction(found)
            if mode in ("rz", "rm"):
                assert here**2 <= exact < above**2
            elif mode == "rp":
                assert below**2 < exact <= here**2
            else:
                assert ((below + here) / 2) ** 2 <= exact <= ((above + here) / 2) ** 2
        else:
            assert same(
                found, math.sqrt(number) if number >= 0 else (number or math.nan) * math.nan
            )


def test_elementary_functions_are_close() -> None:
    values = np.linspace(0.01, 3, 97).astype(F32)
    for name, function in {
        "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
        "rcp": np.reciprocal, "sqrt": np.sqrt, "rsqrt": lambda v: 1 / np.sqrt(v),
    }.items():  # fmt: skip
        found = single(f"{name}.approx.f32 {{0}}, {{1}};", values.view(np.uint32))
        assert np.allclose(found, function(values.astype(F64)), rtol=2e-7, atol=1e-9), name
    assert single("ex2.approx.ftz.f32 {0}, {1};", bits(-130.0, 1000.0, -math.inf)) == [
        0.0, math.inf, 0.0,
    ]  # fmt: skip
    assert single("lg2.approx.f32 {0}, {1};", bits(0.0, 1.0)) == [-math.inf, 0.0]
    assert single("div.approx.f32 {0}, {1}, {2};", bits(1.0), bits(3.0)) == [float(F32(1) / F32(3))]
    half = np.array([0x3C00], np.uint16)
    assert evaluate("ex2.approx.f16 {0}, {1};", np.uint16, half).tolist() == [0x4000]
    assert evaluate("tanh.approx.bf16 {0}, {1};", np.uint16, np.array([0], np.uint16)) == 0


def test_nan_results_are_canonical() -> None:
    nan = np.array([0xFFC12345], np.uint32)
    assert evaluate("add.f32 {0}, {1}, {1};", np.uint32, nan).tolist() == [0x7FFFFFFF]
    assert evaluate("sub.f32 {0}, {1}, {1};", np.uint32, bits(math.inf)).tolist() == [0x7FFFFFFF]
    half = np.array([0xFE01], np.uint16)
    assert evaluate("add.f16 {0}, {1}, {1};", np.uint16, half).tolist() == [0x7FFF]
    assert evaluate("mul.bf16 {0}, {1}, {1};", np.uint16, np.array([0xFFC1], np.uint16)) == 0x7FFF
