"""Cases of wgmma: operands lie in shared memory as random bytes, read by a descriptor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.emulation.hopper.instruction_case import Case, Random

IMAGE_BYTES = 48 * 1024
"""Shared memory that is filled before the instruction."""
_THREADS = 128
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}
"""Codes of swizzle modes (PTX ISA, "Matrix Descriptor Format")."""

_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
"""Columns of A, by its type."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A descriptor of an operand, all in bytes.

    Attributes:
        begin: From the begin of shared memory.
        leading: Leading byte offset; ``stride``, stride byte offset.
        swizzle: Bytes of a swizzled row, or 0.
        base: Base offset, in rows of 128 bytes.
    """

    begin: int = 0
    leading: int = 16
    stride: int = 1024
    swizzle: int = 128
    base: int = 0

    def bits(self) -> int:
        """Returns the descriptor without its address."""
        return (
            (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | self.base << 49
            | _SWIZZLES[self.swizzle] << 62
        )


def _exact(kind: str, random: Random, count: int) -> npt.NDArray[Any]:
    """Returns whole numbers from -4 to 4 as a type (any bytes of integer types)."""
    if kind in ("s8", "u8"):
        return random.integers(0, 256, count, dtype=np.uint8)
    values = random.integers(-4, 5, count)
    if kind == "tf32":
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    # Codes of 0, 1, 2, 3, 4.
    codes = {"e4m3": (0, 0x38, 0x40, 0x44, 0x48), "e5m2": (0, 0x3C, 0x40, 0x42, 0x44)}[kind]
    encoded = np.array(codes, np.uint8)[np.abs(values)]
    return encoded | np.where(values < 0, 0x80, 0).astype(np.uint8)


def _rounded(kind: str, random: Random, count: int) -> npt.NDArray[Any]:
    """Returns normally distributed numbers as a type."""
    values = random.standard_normal(count).astype(np.float32)
    if kind == "tf32":
        return values
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    top = {"e4m3": 0x50, "e5m2": 0x48}[kind]
    return random.integers(0, top, count, dtype=np.uint8) | (
        random.integers(0, 2, count, dtype=np.uint8) << 7
    )


def _numbers(texts: Sequence[str]) -> str:
    return ", ".join(texts)


def wgmma(
    name: str,
    *,
    n: int = 64,
    kinds: tuple[str, str] = ("bf16", "bf16"),
    accumulator: str = "f32",
    a: Sequence[Matrix] | None = (Matrix(),),
    b: Sequence[Matrix] = (Matrix(begin=16384),),
    accumulates: bool = True,
    scales: tuple[int, int] = (1, 1),
    transposes: tuple[int, int] = (0, 0),
    saturates: bool = False,
    exact: bool = True,
) -> Case:
    """Returns a case with an instruction for each of B's matrices; A without any is registers."""
    registers = n // 2 if accumulator != "f16" else n // 4
    fragment = IMAGE_BYTES + 16 * _THREADS  # A's registers, then sums
    input_bytes = fragment + 4 * registers * _THREADS
    lines = []
    for step in range(IMAGE_BYTES // (16 * _THREADS)):
        at = step * 16 * _THREADS
        lines.append(
            f"ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d2+{at}];"
            f"st.shared.v4.b32 [%r5+{at}], {{%r20, %r21, %r22, %r23}};"
        )
    lines += ["fence.proxy.async;", "bar.sync 0;"]
    lines.append(f"ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d2+{IMAGE_BYTES}];")
    sums = [f"%r{100 + place}" for place in range(registers)]
    for place in range(0, registers, 4) if registers % 4 == 0 else ():
        four = _numbers(sums[place : place + 4])
        lines.append(f"ld.global.v4.b32 {{{four}}}, [%d3+{fragment + 4 * place}];")
    if registers % 4:
        lines += [
            f"ld.global.b32 {each}, [%d3+{fragment + 4 * place}];"
            for place, each in enumerate(sums)
        ]
    lines.append(f"setp.ne.s32 %p1, %r2, {0 if accumulates else _THREADS};")
    for place, matrix in enumerate((*(a or ()), *b)):
        lines.append(
            f"add.s32 %r30, %r4, {matrix.begin}; shr.u32 %r30, %r30, 4;"
            f"cvt.u64.u32 %d{10 + place}, %r30; or.b64 %d{10 + place}, %d{10 + place}, "
            f"{matrix.bits():#x};"
        )
    lines.append("wgmma.fence.sync.aligned;")
    shape = f"m64n{n}k{_DEPTH[kinds[0]]}"
    satfinite = "satfinite." if saturates else ""
    is_integer = accumulator == "s32"
    for place in range(len(b)):
        left = "{%r10, %r11, %r12, %r13}" if a is None else f"%d{10 + place}"
        right = f"%d{10 + len(a or ()) + place}"
        constants = "" if is_integer else f", {scales[0]}, {scales[1]}"
        if kinds[0] in ("f16", "bf16"):
            constants += f", {transposes[1]}" if a is None else ", {}, {}".format(*transposes)
        lines.append(
            f"wgmma.mma_async.sync.aligned.{shape}.{satfinite}{accumulator}.{kinds[0]}.{kinds[1]} "
            f"{{{_numbers(sums)}}}, {left}, {right}, %p1{constants};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines += [f"st.global.b32 [%d4+{4 * place}], {each};" for place, each in enumerate(sums)]
    begin = (
        f"mul.wide.u32 %d5, %r0, 16; add.s64 %d2, %d0, %d5; shl.b32 %r6, %r0, 4;"
        f"add.s32 %r5, %r4, %r6; mul.wide.u32 %d6, %r0, {4 * registers};"
        "add.s64 %d3, %d0, %d6; add.s64 %d4, %d1, %d6;"
    )

    def make(random: Random) -> npt.NDArray[np.uint8]:
        fill = _exact if exact else _rounded
        parts = [np.empty(0, np.uint8)]
        # The first third of the image is A's, the rest is B's.
        for kind, size in ((kinds[0], 16384), (kinds[1], IMAGE_BYTES - 16384), (kinds[0], 2048)):
            size_of = fill(kind, random, 1).itemsize
            parts.append(fill(kind, random, size // size_of).view(np.uint8))
        if is_integer:
            given = random.integers(-1000, 1000, registers * _THREADS, dtype=np.int32)
            if saturates:
                given = np.where(random.random(len(given)) < 0.5, given + (2**31 - 1001), given)
                given = given.astype(np.int32)
        elif accumulator == "f16":
            given = random.integers(-50, 50, 2 * registers * _THREADS).astype(np.float16)
        else:
            given = random.integers(-50, 50, registers * _THREADS).astype(np.float32)
        parts.append(given.view(np.uint8))
        made = np.concatenate(parts)
        assert len(made) == input_bytes
        return made

    return Case(
        name=f"wgmma/{name}",
        body="\n".join([begin, *lines]),
        make=make,
        output_bytes=4 * registers * _THREADS,
        result="bits" if is_integer else accumulator,
        ulps=0 if exact else None,
        threads=_THREADS,
        shared=IMAGE_BYTES + 16384,
    )


def _layouts() -> Iterator[Case]:
    """Swizzles and offsets of rows along k, and along m or n."""
    for swizzle, leading, stride in (
        (0, 128, 256), (0, 2048, 128), (32, 16, 256), (64, 16, 512), (128, 16, 1024),
        (128, 16, 2048), (64, 16, 1536), (32, 16, 272),
    ):  # fmt: skip
        matrix = Matrix(swizzle=swizzle, leading=leading, stride=stride)
        right = Matrix(begin=16384, swizzle=swizzle, leading=leading, stride=stride)
        yield wgmma(f"along k/{swizzle}/{leading}/{stride}", a=(matrix,), b=(right,))
    for begin in (32, 64, 96):
        left, right = Matrix(begin=begin), Matrix(begin=16384 + begin)
        yield wgmma(f"along k/128/from {begin}", a=(left,), b=(right,))
    for base in (1, 2, 5):
        left = Matrix(begin=128 * base, base=base)
        right = Matrix(begin=16384 + 128 * base, base=base)
        yield wgmma(f"along k/128/base {base}", a=(left,), b=(right,))
    left, right = Matrix(begin=256), Matrix(begin=16384 + 256)
    yield wgmma("along k/128/from 256 without base", a=(left,), b=(right,))
    for swizzle, leading, stride, n in (
        (0, 1024, 128, 64), (0, 128, 1024, 64), (32, 512, 1024, 64), (64, 1024, 2048, 64),
        (128, 4096, 1024, 64), (128, 2048, 1024, 128), (128, 4096, 1024, 192),
    ):  # fmt: skip
        left = Matrix(swizzle=swizzle, leading=leading, stride=stride)
        right = Matrix(begin=16384, swizzle=swizzle, leading=leading, stride=stride)
        name = f"{swizzle}/{leading}/{stride}/n {n}"
        yield wgmma(f"along m and n/{name}", n=n, a=(left,), b=(right,), transposes=(1, 1))
    yield wgmma("along m", transposes=(1, 0))
    yield wgmma("along n", transposes=(0, 1), b=(Matrix(begin=16384, leading=2048),), n=96)


def _types() -> Iterator[Case]:
    bytes_ = ("e4m3", "e5m2")
    kinds = [("f16", "f16", "f32"), ("f16", "f16", "f16"), ("tf32", "tf32", "f32")]
    kinds += [("bf16", "bf16", "f32")]
    kinds += [(a, b, c) for a in bytes_ for b in bytes_ for c in ("f16", "f32")]
    kinds += [(a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")]
    for left, right, accumulator in kinds:
        name = f"{accumulator}.{left}.{right}"
        pair = (left, right)
        yield wgmma(name, kinds=pair, accumulator=accumulator)
        yield wgmma(f"{name}/A in registers", kinds=pair, accumulator=accumulator, a=None)
        two = {"a": (Matrix(), Matrix(begin=32)), "b": (Matrix(begin=16384), Matrix(begin=16416))}
        yield wgmma(f"{name}/two", kinds=pair, accumulator=accumulator, **two)  # type: ignore[arg-type]
        if accumulator != "s32":
            yield wgmma(f"{name}/negated", kinds=pair, accumulator=accumulator, scales=(-1, 1))
        yield wgmma(f"{name}/new", kinds=pair, accumulator=accumulator, accumulates=False)
    yield wgmma("s32.s8.s8/saturated", kinds=("s8", "s8"), accumulator="s32", saturates=True)
    yield wgmma("f32.bf16.bf16/both negated", scales=(-1, -1))
    yield wgmma("f32.f16.f16/B negated", kinds=("f16", "f16"), scales=(1, -1))


def _widths() -> Iterator[Case]:
    for n in (8, 16, 24, 40, 104, 152, 208, 256):
        yield wgmma(f"n {n}", n=n)
    for n in (8, 24, 48, 208, 256):
        yield wgmma(f"s32/n {n}", n=n, kinds=("s8", "u8"), accumulator="s32")


def _inexact() -> Iterator[Case]:
    for kind in ("bf16", "f16", "tf32", "e4m3", "e5m2"):
        yield wgmma(f"f32.{kind}/rounded", kinds=(kind, kind), exact=False)
    yield wgmma("f16.f16/rounded", kinds=("f16", "f16"), accumulator="f16", exact=False)


def wgmma_cases() -> list[Case]:
    """Returns all of them."""
    return [*_layouts(), *_types(), *_widths(), *_inexact()]
