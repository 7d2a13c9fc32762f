"""Conversions against Python's numbers and torch's narrow types."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from nvgemm_aot.emulator.emulation_errors import UnsupportedPtxError
from tests.support.one_instruction import evaluate

F32 = np.float32
NUMBERS = np.array(
    [0.0, -0.0, 0.4, 0.5, 0.6, 1.5, 2.5, -0.5, -1.5, -2.4, 127.5, 128.0, -128.5, 255.5, 256.0,
     65504.0, 65519.0, 65520.0, 1e-8, 5.96e-8, 2.98e-8, 8.94e-8, 3.4e38, 448.0, 464.0, 465.0,
     57344.0, 61440.0, 61441.0, 2147483520.0, 2147483648.0, -2147483648.0, -2147483904.0,
     4294967040.0, 4294967296.0, 9.3e18, -9.3e18, 1.9e19, math.inf, -math.inf, math.nan,
     1.00390625, 1.01171875, 1e-40, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-17, 6.0, 5.0, 0.25,
     0.75, 1.25, 1.75, 3.5, 7.0, 7.25, 28.0, 30.0, 31.0],
    F32,
)  # fmt: skip
RANDOM = np.random.default_rng(0)
SINGLES = np.concatenate(
    [NUMBERS, RANDOM.integers(0, 1 << 32, 500, np.uint32).view(F32), RANDOM.normal(0, 30, 500)]
).astype(F32)

WHOLE: dict[str, Callable[[float], int]] = {
    "rni": lambda value: round(Fraction(value)),
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64", "s16", "u16"])
def test_floats_become_clamped_integers(to: str, mode: str) -> None:
    size = int(to[1:])
    least, most = (-(1 << size - 1), (1 << size - 1) - 1) if to[0] == "s" else (0, (1 << size) - 1)
    found = evaluate(
        f"cvt.{mode}.{to}.f32 {{0}}, {{1}};", f"{'i' if to[0] == 's' else 'u'}{size // 8}",
        SINGLES.view(np.uint32),
    )  # fmt: skip
    for value, got in zip(SINGLES.tolist(), found.tolist()):
        if math.isnan(value):
            want = 0 if size < 64 else least if to[0] == "s" else 1 << 63
        elif math.isinf(value):
            want = most if value > 0 else least
        else:
            want = min(max(WHOLE[mode](value), least), most)
        assert got == want, (value, got, want)


def test_whole_numbers_stay_floats() -> None:
    values = SINGLES[np.isfinite(SINGLES)]
    for mode, function in WHOLE.items():
        found = evaluate(f"cvt.{mode}.f32.f32 {{0}}, {{1}};", np.uint32, values.view(np.uint32))
        assert found.view(F32).tolist() == [float(function(each)) for each in values.tolist()]


@pytest.mark.parametrize("of", ["s32", "u32", "s64", "u64"])
def test_integers_become_rounded_floats(of: str) -> None:
    size = int(of[1:])
    values = RANDOM.integers(0, 1 << size, 300, f"u{size // 8}")
    edges = [0, 1, (1 << 24) + 1, (1 << 24) + 3, (1 << size - 1) - 1, 1 << size - 1, 65519, 65520]
    if size == 64:
        # Ties that a sum of the lowest bits breaks: two roundings give another result.
        edges += [(1 << 62) + (1 << 38) + 1, (1 << 62) + (1 << 38), (1 << 53) + 1, (1 << 54) + 3]
        edges += [(1 << 62) + (1 << 54) + 1, (1 << 62) + (1 << 54), (1 << 62) + 3 * (1 << 54) - 1]
    values = np.concatenate([np.array(edges, values.dtype), values, values >> (size // 2)])
    exact = [int(each) for each in values.view(f"i{size // 8}" if of[0] == "s" else values.dtype)]
    single = evaluate(f"cvt.rn.f32.{of} {{0}}, {{1}};", np.uint32, values).view(F32)
    for value, got in zip(exact, single.tolist()):
        near = abs(Fraction(got) - value)
        for side in (-math.inf, math.inf):
            other = Fraction(float(np.nextafter(F32(got), F32(side))))
            assert near <= abs(other - value), (value, got)
    for mode, bound in (("rm", lambda v, g: g <= v), ("rp", lambda v, g: g >= v)):
        directed = evaluate(f"cvt.{mode}.f32.{of} {{0}}, {{1}};", np.uint32, values).view(F32)
        assert all(bound(v, Fraction(g)) for v, g in zip(exact, directed.tolist()))
        assert all(
            abs(int(a) - int(b)) <= 1 for a, b in zip(directed.view("i4"), single.view("i4"))
        )
    brain = evaluate(f"cvt.rn.bf16.{of} {{0}}, {{1}};", np.uint16, values)
    for value, got in zip(exact, brain.tolist()):
        candidates = [code for code in (got - 1, got, got + 1) if 0 <= code <= 0xFFFF]
        numbers = {code: Fraction(*_brain(code).as_integer_ratio()) for code in candidates}
        best = min(abs(number - value) for number in numbers.values())
        ties = [code for code in candidates if abs(numbers[code] - value) == best]
        assert got in ties, (value, hex(got))
        assert len(ties) == 1 or got % 2 == 0, (value, hex(got))
    half = evaluate(f"cvt.rn.f16.{of} {{0}}, {{1}};", np.uint16, values).view(np.float16)
    with np.errstate(over="ignore"):
        wanted = np.array([float(each) for each in exact]).astype(np.float16)
    assert np.array_equal(half, wanted)


def _brain(code: int) -> float:
    return float((np.array([code], np.uint32) << 16).view(F32)[0])


def test_integers_change_width() -> None:
    words = np.array(
        [0, 1, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF, 0x12345680],
        np.uint32,
    )
    as_int = words.view(np.int32).astype(np.int64)
    assert evaluate("cvt.s64.s32 {0}, {1};", np.int64, words).tolist() == as_int.tolist()
    assert evaluate("cvt.u64.u32 {0}, {1};", np.uint64, words).tolist() == words.tolist()
    assert evaluate("cvt.u16.u32 {0}, {1};", np.uint16, words).tolist() == (words & 0xFFFF).tolist()
    signed = (words & 0xFF).astype(np.uint8).view(np.int8)
    assert evaluate("cvt.s32.s8 {0}, {1};", np.int32, words).tolist() == signed.tolist()
    assert evaluate("cvt.u32.u8 {0}, {1};", np.uint32, words).tolist() == (words & 0xFF).tolist()
    assert evaluate("cvt.s16.s8 {0}, {1};", np.int16, words).tolist() == signed.tolist()
    clamped = np.clip(as_int, -128, 127)
    assert evaluate("cvt.sat.s8.s32 {0}, {1};", np.int32, words).tolist() == clamped.tolist()
    clamped = np.clip(as_int, 0, 255)
    assert evaluate("cvt.sat.u8.s32 {0}, {1};", np.uint32, words).tolist() == clamped.tolist()
    assert evaluate("cvt.sat.s32.u32 {0}, {1};", np.int32, words).tolist() == [
        min(each, (1 << 31) - 1) for each in words.tolist()
    ]
    short = np.array([0x8000, 0x7FFF], np.uint16)
    assert evaluate("cvt.s32.s16 {0}, {1};", np.int32, short).tolist() == [-32768, 32767]
    assert evaluate("cvt.u32.u16 {0}, {1};", np.uint32, short).tolist() == [32768, 32767]


def bits_of(values: torch.Tensor, kind: torch.dtype) -> np.ndarray:
    return values.to(kind).view(torch.int16).numpy().view(np.uint16)


def equal_or_nan(found: np.ndarray, wanted: np.ndarray, nan: np.ndarray, code: int) -> None:
    assert np.array_equal(found[~nan], wanted[~nan])
    assert set(found[nan].tolist()) <= {code}


def test_f32_becomes_half_precision() -> None:
    values, bits = torch.from_numpy(SINGLES), SINGLES.view(np.uint32)
    nan = np.isnan(SINGLES)
    half, brain = bits_of(values, torch.float16), bits_of(values, torch.bfloat16)
    equal_or_nan(evaluate("cvt.rn.f16.f32 {0}, {1};", np.uint16, bits), half, nan, 0x7FFF)
    equal_or_nan(evaluate("cvt.rn.bf16.f32 {0}, {1};", np.uint16, bits), brain, nan, 0x7FFF)
    other = bits[::-1].copy()
    for kind, wanted in (("f16", half), ("bf16", brain)):
        found = evaluate(f"cvt.rn.{kind}x2.f32 {{0}}, {{1}}, {{2}};", np.uint32, bits, other)
        equal_or_nan((found >> 16).astype(np.uint16), wanted, nan, 0x7FFF)
        equal_or_nan((found & 0xFFFF).astype(np.uint16), wanted[::-1], nan[::-1], 0x7FFF)
    cut = evaluate("cvt.rz.bf16.f32 {0}, {1};", np.uint16, bits)
    equal_or_nan(cut, (bits >> 16).astype(np.uint16), nan, 0x7FFF)
    relu = evaluate("cvt.rn.relu.bf16.f32 {0}, {1};", np.uint16, bits)
    wanted = np.where(np.signbit(SINGLES), 0, brain)  # an H100 keeps no -0 either
    equal_or_nan(relu, wanted.astype(np.uint16), nan, 0x7FFF)
    finite = evaluate("cvt.rn.satfinite.f16.f32 {0}, {1};", np.uint16, bits)
    clamped = bits_of(values.clamp(-65504, 65504), torch.float16)
    equal_or_nan(finite, clamped, nan, 0x7FFF)


def test_half_precision_becomes_wider() -> None:
    codes = np.arange(0, 65536, 7).astype(np.uint16)
    half = torch.from_numpy(codes.view(np.int16)).view(torch.float16).float().numpy()
    brain = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    found = evaluate("cvt.f32.f16 {0}, {1};", np.uint32, codes).view(F32)
    assert np.array_equal(found, half, equal_nan=True)
    found = evaluate("cvt.f32.bf16 {0}, {1};", np.uint32, codes).view(F32)
    assert np.array_equal(found, brain, equal_nan=True)
    found = evaluate("cvt.f64.f16 {0}, {1};", np.uint64, codes).view(np.float64)
    assert np.array_equal(found, half.astype(np.float64), equal_nan=True)
    found = evaluate("cvt.rn.bf16.f16 {0}, {1};", np.uint16, codes)
    wanted = bits_of(torch.from_numpy(half), torch.bfloat16)
    equal_or_nan(found, wanted, np.isnan(half), 0x7FFF)


def test_f64_is_rounded_once_to_narrower_types() -> None:
    # Rounded to float32 first, these would be ties.
    values = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-24 + 2.0**-50])
    bits = values.view(np.uint64)
    assert evaluate("cvt.rn.bf16.f64 {0}, {1};", np.uint16, bits)[0] == 0x3F81
    assert evaluate("cvt.rn.f16.f64 {0}, {1};", np.uint16, bits)[1] == 0x3C01
    found = evaluate("cvt.rn.f32.f64 {0}, {1};", np.uint32, bits).view(F32)
    assert np.array_equal(found, values.astype(F32))
    assert evaluate("cvt.rp.f32.f64 {0}, {1};", np.uint32, bits).view(F32)[2] == 1 + 2.0**-23
    assert evaluate("cvt.rz.f32.f64 {0}, {1};", np.uint32, bits).view(F32)[2] == 1.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("rz", (256, -256)), ("rm", (256, -258)), ("rp", (258, -256)), ("rn", (256, -256))],
)
@pytest.mark.parametrize("of", ["s32", "s64", "f64"])
def test_bf16_is_rounded_in_every_mode(of: str, mode: str, expected: tuple[int, int]) -> None:
    dtype = {"s32": np.int32, "s64": np.int64, "f64": np.float64}[of]
    found = evaluate(f"cvt.{mode}.bf16.{of} {{0}}, {{1}};", np.uint16, np.array([257, -257], dtype))
    wide = (found[:2].astype(np.uint32) << 16).view(F32)
    assert tuple(wide.tolist()) == expected


def test_saturation_and_flushing() -> None:
    values = np.array([-1.0, 0.5, 2.0, math.nan, 1e-40], F32).view(np.uint32)
    found = evaluate("cvt.sat.f32.f32 {0}, {1};", np.uint32, values).view(F32)
    assert found[:4].tolist() == [0, 0.5, 1, 0]
    found = evaluate("cvt.ftz.f32.f32 {0}, {1};", np.uint32, values).view(F32)
    assert found[4] == 0


@pytest.mark.parametrize(
    ("kind", "dtype", "largest"),
    [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)],
)
def test_fp8_matches_torch(kind: str, dtype: torch.dtype, largest: float) -> None:
    values = torch.from_numpy(SINGLES)
    nan = np.isnan(SINGLES)
    wanted = values.clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
    bits = SINGLES.view(np.uint32)
    found = evaluate(
        f"cvt.rn.satfinite.{kind}x2.f32 {{0}}, {{1}}, {{2}};", np.uint16, bits, bits[::-1].copy()
    )
    equal_or_nan((found >> 8).astype(np.uint8), wanted, nan, 0x7F)
    equal_or_nan((found & 255).astype(np.uint8), wanted[::-1], nan[::-1], 0x7F)
    relu = evaluate(f"cvt.rn.satfinite.relu.{kind}x2.f32 {{0}}, {{1}}, {{1}};", np.uint16, bits)
    equal_or_nan((relu & 255).astype(np.uint8), np.where(np.signbit(SINGLES), 0, wanted), nan, 0x7F)
    codes = np.arange(256, dtype=np.uint16) | np.arange(255, -1, -1, dtype=np.uint16) << 8
    wide = evaluate(f"cvt.rn.f16x2.{kind}x2 {{0}}, {{1}};", np.uint32, codes)
    decoded = torch.arange(256, dtype=torch.uint8).view(dtype).half().numpy()
    low = (wide & 0xFFFF).astype(np.uint16).view(np.float16)
    assert np.array_equal(low, decoded, equal_nan=True)
    high = (wide >> 16).astype(np.uint16).view(np.float16)
    assert np.array_equal(high, decoded[::-1], equal_nan=True)
    again = evaluate(f"cvt.rn.satfinite.{kind}x2.f16x2 {{0}}, {{1}};", np.uint16, wide)
    finite = np.isfinite(decoded)
    assert np.array_equal((again & 255)[finite], np.arange(256)[finite])


# Values that are not negative, in the order of their codes (OCP Microscaling Formats, 5.3).
SIX_BITS = {
    "e2m3": [(n / 8 if n < 8 else (1 + n % 8 / 8) * 2.0 ** (n // 8 - 1)) for n in range(32)],
    "e3m2": [(n / 16 if n < 4 else (1 + n % 4 / 4) * 2.0 ** (n // 4 - 3)) for n in range(32)],
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
}


@pytest.mark.parametrize("kind", SIX_BITS)
def test_fp4_and_fp6_round_to_the_nearest_code(kind: str) -> None:
    table = [float(each) for each in SIX_BITS[kind]]
    sign, half = len(table), 4 if kind == "e2m1" else 8

    def nearest(value: float) -> int:
        if math.isnan(value):
            return sign - 1
        size = min(abs(value), table[-1])
        best = min(abs(each - size) for each in table)
        ties = [code for code, each in enumerate(table) if abs(each - size) == best]
        code = next(each for each in ties if len(ties) == 1 or each % 2 == 0)
        return code + (sign if math.copysign(1, value) < 0 else 0)

    bits = SINGLES.view(np.uint32)
    if kind == "e2m1":
        text = "{{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, {1}, {2}; cvt.u16.u8 {0}, t; }}"
        back = "{{ .reg .b8 t; cvt.u8.u16 t, {1}; cvt.rn.f16x2.e2m1x2 {0}, t; }}"
    else:
        text = f"cvt.rn.satfinite.{kind}x2.f32 {{0}}, {{1}}, {{2}};"
        back = f"cvt.rn.f16x2.{kind}x2 {{0}}, {{1}};"
    found = evaluate(text, np.uint16, bits, bits[::-1].copy())
    wanted = [nearest(each) for each in SINGLES.tolist()]
    assert (found >> half).tolist() == wanted
    assert (found & (1 << half) - 1).tolist() == wanted[::-1]
    codes = np.arange(2 * sign, dtype=np.uint16)
    wide = evaluate(back, np.uint32, codes | codes[::-1] << half).view(np.float16)
    assert wide[::2].tolist() == table + [-each for each in table]
    assert wide[1::2].tolist() == (table + [-each for each in table])[::-1]


def test_scales_are_powers_of_two() -> None:
    values = np.array(
        [0.0, 1.0, 1.5, 2.0, 3.0, 2.0**127, 3e38, 1e-39, 2.0**-127, 2.0**-126, math.inf, math.nan],
        F32,
    )
    bits = values.view(np.uint32)
    zero = np.zeros_like(bits)
    up = evaluate("cvt.rp.satfinite.ue8m0x2.f32 {0}, {2}, {1};", np.uint16, bits, zero)
    assert up.tolist() == [0, 127, 128, 128, 129, 254, 254, 0, 0, 1, 254, 255]
    down = evaluate("cvt.rz.satfinite.ue8m0x2.f32 {0}, {1}, {2};", np.uint16, bits, zero)
    assert (down >> 8).tolist() == [0, 127, 127, 128, 128, 254, 254, 0, 0, 1, 254, 255]
    codes = np.array([0x7F00, 0x80FE, 0x00FF], np.uint16)
    wide = evaluate("cvt.rn.bf16x2.ue8m0x2 {0}, {1};", np.uint32, codes)
    assert wide.tolist() == [0x3F80_0040, 0x4000_7F00, 0x0040_7FFF]


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32_keeps_ten_bits_of_mantissa(mode: str) -> None:
    values = SINGLES[np.isfinite(SINGLES) & (np.abs(SINGLES) < 1e38) & (np.abs(SINGLES) > 1e-30)]
    found = evaluate(f"cvt.{mode}.tf32.f32 {{0}}, {{1}};", np.uint32, values.view(np.uint32))
    assert not (found & 0x1FFF).any()
    for value, got in zip(values.tolist(), found.view(F32).tolist()):
        unit = 2.0 ** (math.frexp(value)[1] - 11)
        scaled = Fraction(value) / Fraction(unit)
        whole = {
            "rn": round(scaled),
            "rz": math.trunc(scaled),
            "rna": math.floor(abs(scaled) + Fraction(1, 2)) * (1 if value > 0 else -1),
        }[mode]
        assert Fraction(got) == whole * Fraction(unit), value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cvt.f32.s32 {0}, {1};", "rounding .None"),
        ("cvt.rn.s32.f32 {0}, {1};", "rounding .rn"),
        ("cvt.rni.s32.s32 {0}, {1};", "qualifier .rni"),
        ("cvt.rn.e4m3x2.f32 {0}, {1}, {1};", "satfinite"),
        ("cvt.rn.satfinite.e9m9x2.f32 {0}, {1}, {1};", "e9m9x2"),
        ("cvt.rs.bf16x2.f32 {0}, {1}, {1};", "qualifier .rs"),
        ("cvt.rn.f32.f16 {0}, {1};", "rounding .rn"),
    ],
)
def test_rejects_conversions_that_do_not_exist(text: str, named: str) -> None:
    with pytest.raises(UnsupportedPtxError, match=named):
        evaluate(text, np.uint32, np.zeros(32, np.uint32))
