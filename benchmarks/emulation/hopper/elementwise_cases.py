"""Cases of instructions that compute a lane's result from its own operands, and of warps' votes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.emulation.hopper.instruction_case import Case, Random

THREADS, BLOCKS = 256, 8
COUNT = THREADS * BLOCKS
Words = npt.NDArray[np.uint32]


def _bits(random: Random, count: int) -> Words:
    """Returns random words, among them small ones and the ends of ranges."""
    words = random.integers(0, 1 << 32, count, dtype=np.uint32)
    shifts = random.integers(0, 32, count, dtype=np.uint32)
    words = np.where(random.random(count) < 0.5, words >> shifts, words)
    edges = np.array([0, 1, 2, 31, 32, 33, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF], np.uint32)
    return np.where(random.random(count) < 0.1, random.choice(edges, count), words)


def _floats(random: Random, count: int) -> Words:
    """Returns floats of all magnitudes, zeros, infinities, NaN and denormal numbers."""
    exponents = random.integers(-30, 30, count)
    values = ((random.random(count) * 2 - 1) * np.exp2(exponents)).astype(np.float32)
    words = values.view(np.uint32)
    any_bits = random.integers(0, 1 << 32, count, dtype=np.uint32)
    words = np.where(random.random(count) < 0.15, any_bits, words)
    special = np.array(
        [0, 1 << 31, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 1, 0x8000_0001, 0x7F_FFFF, 0x7F7F_FFFF],
        np.uint32,
    )
    return np.where(random.random(count) < 0.05, random.choice(special, count), words)


def _gates(random: Random, count: int) -> Words:
    """Returns floats as activations see them: -20 to 20."""
    return ((random.random(count) * 40 - 20).astype(np.float32)).view(np.uint32)


def _halves(random: Random, count: int) -> Words:
    """Returns pairs of f16 of moderate magnitude."""
    values = (random.random(2 * count) * 2 - 1) * np.exp2(random.integers(-8, 8, 2 * count))
    return values.astype(np.float16).view(np.uint32)


def _brain_halves(random: Random, count: int) -> Words:
    """Returns pairs of bf16 of moderate magnitude."""
    values = (random.random(2 * count) * 2 - 1) * np.exp2(random.integers(-8, 8, 2 * count))
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def elementwise(
    name: str,
    text: str,
    make: Callable[[Random, int], Words],
    *,
    reads: int = 1,
    writes: int = 1,
    result: str = "bits",
    ulps: int | None = 0,
) -> Case:
    """Returns a case that applies instructions to ``%r10``, ... and stores ``%r20``, ..."""
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%d2+{4 * i}];" for i in range(reads))
    stores = "\n".join(f"st.global.b32 [%d3+{4 * i}], %r{20 + i};" for i in range(writes))
    body = (
        f"mul.wide.u32 %d4, %r3, {4 * reads};\nadd.s64 %d2, %d0, %d4;\n{loads}\n{text}\n"
        f"mul.wide.u32 %d5, %r3, {4 * writes};\nadd.s64 %d3, %d1, %d5;\n{stores}"
    )
    return Case(
        name=name,
        body=body,
        make=lambda random: make(random, COUNT * reads),
        output_bytes=4 * writes * COUNT,
        result=result,
        ulps=ulps,
        threads=THREADS,
        blocks=BLOCKS,
    )


def _approximations() -> Iterator[Case]:
    for opcode, ulps in (
        ("ex2.approx.ftz.f32", 2),
        ("ex2.approx.f32", 2),
        ("rcp.approx.ftz.f32", 1),
        ("lg2.approx.ftz.f32", None),
        ("rsqrt.approx.ftz.f32", 2),
        ("sqrt.approx.ftz.f32", 2),
        ("tanh.approx.f32", None),
    ):
        for kind, make in (("wide", _floats), ("gates", _gates)):
            text = f"{opcode} %r20, %r10;"
            yield elementwise(f"{opcode}/{kind}", text, make, result="f32", ulps=ulps)
    yield elementwise("rcp.rn.f32", "rcp.rn.f32 %r20, %r10;", _floats, result="f32")
    yield elementwise("div.rn.f32", "div.rn.f32 %r20, %r10, %r11;", _floats, reads=2, result="f32")
    yield elementwise("sqrt.rn.f32", "sqrt.rn.f32 %r20, %r10;", _floats, result="f32")


def _conversions() -> Iterator[Case]:
    pairs = (
        ("cvt.rn.bf16x2.f32", "bf16"), ("cvt.rz.bf16x2.f32", "bf16"),
        ("cvt.rn.relu.bf16x2.f32", "bf16"), ("cvt.rn.f16x2.f32", "f16"),
        ("cvt.rz.f16x2.f32", "f16"), ("cvt.rn.relu.f16x2.f32", "f16"),
    )  # fmt: skip
    for opcode, result in pairs:
        text = f"{opcode} %r20, %r10, %r11;"
        yield elementwise(opcode, text, _floats, reads=2, result=result)
    for kind in ("e4m3x2", "e5m2x2"):
        for relu in ("", "relu."):
            opcode = f"cvt.rn.satfinite.{relu}{kind}.f32"
            text = f"{opcode} %h1, %r10, %r11; cvt.u32.u16 %r20, %h1;"
            yield elementwise(opcode, text, _floats, reads=2)
        opcode = f"cvt.rn.satfinite.{kind}.f16x2"
        text = f"{opcode} %h1, %r10; cvt.u32.u16 %r20, %h1;"
        yield elementwise(opcode, text, _bits)
        opcode = f"cvt.rn.f16x2.{kind}"
        text = f"cvt.u16.u32 %h1, %r10; {opcode} %r20, %h1;"
        yield elementwise(opcode, text, _bits, result="f16")
    for opcode, result in (("cvt.rn.f16.f32", "f16"), ("cvt.rn.bf16.f32", "bf16")):
        text = f"{opcode} %h1, %r10; mov.b32 %r20, {{%h1, %h1}};"
        yield elementwise(opcode, text, _floats, result=result)
    for opcode in ("cvt.f32.bf16", "cvt.f32.f16"):
        text = f"cvt.u16.u32 %h1, %r10; {opcode} %r20, %h1;"
        yield elementwise(opcode, text, _bits, result="f32")
    for opcode in (
        "cvt.rni.s32.f32", "cvt.rzi.s32.f32", "cvt.rmi.s32.f32", "cvt.rpi.s32.f32",
        "cvt.rzi.u32.f32", "cvt.rni.ftz.s32.f32",
    ):  # fmt: skip
        yield elementwise(opcode, f"{opcode} %r20, %r10;", _floats)
    for opcode in ("cvt.rni.sat.s8.f32", "cvt.rzi.sat.u8.f32"):
        text = f"{opcode} %r19, %r10; and.b32 %r20, %r19, 255;"
        yield elementwise(opcode, text, _floats)
    for opcode in (
        "cvt.rmi.f32.f32", "cvt.rpi.f32.f32", "cvt.rni.f32.f32", "cvt.rzi.f32.f32",
        "cvt.sat.f32.f32", "cvt.rna.tf32.f32",
    ):  # fmt: skip
        yield elementwise(opcode, f"{opcode} %r20, %r10;", _floats, result="f32")
    for opcode in ("cvt.rn.f32.s32", "cvt.rn.f32.u32", "cvt.rz.f32.s32"):
        yield elementwise(opcode, f"{opcode} %r20, %r10;", _bits, result="f32")
    for opcode in ("cvt.sat.s8.s32", "cvt.sat.u8.s32", "cvt.sat.u8.u32"):
        text = f"{opcode} %r19, %r10; and.b32 %r20, %r19, 255;"
        yield elementwise(opcode, text, _bits)
    yield elementwise(
        "cvt.s64.s32", "cvt.s64.s32 %d6, %r10; mov.b64 {%r20, %r21}, %d6;", _bits, writes=2
    )
    yield elementwise("cvt.s32.s16", "cvt.u16.u32 %h1, %r10; cvt.s32.s16 %r20, %h1;", _bits)
    yield elementwise("cvt.s32.s8", "cvt.s32.s8 %r20, %r10;", _bits)


def _float_arithmetic() -> Iterator[Case]:
    for opcode in (
        "add.f32", "add.rn.f32", "add.ftz.f32", "sub.f32", "mul.f32", "mul.rn.ftz.f32",
        "add.rz.f32",
        "min.f32", "max.f32", "max.ftz.f32", "max.NaN.f32", "min.NaN.f32", "copysign.f32",
        "add.sat.f32", "add.rm.f32", "mul.rp.f32",
    ):  # fmt: skip
        text = f"{opcode} %r20, %r10, %r11;"
        yield elementwise(opcode, text, _floats, reads=2, result="f32")
    for opcode in ("fma.rn.f32", "fma.rn.ftz.f32", "fma.rz.f32", "fma.rn.sat.f32"):
        text = f"{opcode} %r20, %r10, %r11, %r12;"
        yield elementwise(opcode, text, _floats, reads=3, result="f32")
    for opcode in ("neg.f32", "abs.f32", "abs.ftz.f32"):
        yield elementwise(opcode, f"{opcode} %r20, %r10;", _floats, result="f32")
    for kind, make in (("f16", _halves), ("bf16", _brain_halves)):
        for opcode in (f"add.rn.{kind}x2", f"mul.rn.{kind}x2", f"max.{kind}x2", f"min.{kind}x2"):
            text = f"{opcode} %r20, %r10, %r11;"
            yield elementwise(opcode, text, make, reads=2, result=kind)
        for opcode in (f"fma.rn.{kind}x2", f"fma.rn.relu.{kind}x2"):
            text = f"{opcode} %r20, %r10, %r11, %r12;"
            yield elementwise(opcode, text, make, reads=3, result=kind)
        yield elementwise(f"neg.{kind}x2", f"neg.{kind}x2 %r20, %r10;", make, result=kind)


def _comparisons() -> Iterator[Case]:
    tests = {
        "f32": ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu",
                "num", "nan"),
        "s32": ("eq", "ne", "lt", "le", "gt", "ge"),
        "u32": ("lt", "le", "gt", "ge", "lo", "hs"),
    }  # fmt: skip
    for kind, names in tests.items():
        lines = ["mov.b32 %r20, 0;"]
        for place, name in enumerate(names):
            lines.append(f"setp.{name}.{kind} %p1, %r10, %r11;")
            lines.append(f"selp.b32 %r30, {1 << place}, 0, %p1; or.b32 %r20, %r20, %r30;")
        make = _floats if kind == "f32" else _bits
        yield elementwise(f"setp.{kind}", "\n".join(lines), make, reads=2)
    text = (
        "setp.gt.s32 %p1, %r12, 0; setp.lt.and.s32 %p2|%p3, %r10, %r11, %p1;"
        "selp.b32 %r20, 1, 0, %p2; selp.b32 %r21, 1, 0, %p3;"
    )
    yield elementwise("setp.lt.and.s32", text, _bits, reads=3, writes=2)


def _integers() -> Iterator[Case]:
    for opcode in (
        "add.s32", "sub.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32", "min.s32", "max.s32",
        "min.u32", "max.u32", "min.relu.s32", "max.relu.s32", "and.b32", "or.b32", "xor.b32",
        "shl.b32", "shr.u32", "shr.s32", "add.sat.s32",
    ):  # fmt: skip
        yield elementwise(opcode, f"{opcode} %r20, %r10, %r11;", _bits, reads=2)
    for opcode in ("div.s32", "div.u32", "rem.s32", "rem.u32"):
        text = f"or.b32 %r11, %r11, 1; {opcode} %r20, %r10, %r11;"
        yield elementwise(opcode, text, _bits, reads=2)
    for opcode in (
        "mad.lo.s32", "mad.hi.u32", "prmt.b32", "prmt.b32.f4e", "prmt.b32.b4e", "prmt.b32.rc8",
        "prmt.b32.ecl", "prmt.b32.ecr", "prmt.b32.rc16", "shf.l.wrap.b32", "shf.r.wrap.b32",
        "shf.l.clamp.b32", "shf.r.clamp.b32", "bfe.u32", "bfe.s32",
    ):  # fmt: skip
        yield elementwise(opcode, f"{opcode} %r20, %r10, %r11, %r12;", _bits, reads=3)
    yield elementwise("bfi.b32", "bfi.b32 %r20, %r10, %r11, %r12, %r13;", _bits, reads=4)
    for table in (0x96, 0xE8, 0xF8, 0x1B):
        text = f"lop3.b32 %r20, %r10, %r11, %r12, {table};"
        yield elementwise(f"lop3.b32/{table:#x}", text, _bits, reads=3)
    for opcode in ("not.b32", "neg.s32", "abs.s32", "popc.b32", "clz.b32", "brev.b32",
                   "bfind.u32", "bfind.s32", "cnot.b32"):  # fmt: skip
        yield elementwise(opcode, f"{opcode} %r20, %r10;", _bits)
    wide = "mov.b64 %d6, {%r10, %r11}; mov.b64 %d7, {%r12, %r13};"
    for opcode in (
        "add.s64",
        "sub.s64",
        "mul.lo.s64",
        "mul.hi.u64",
        "min.s64",
        "and.b64",
        "or.b64",
    ):
        text = f"{wide} {opcode} %d8, %d6, %d7; mov.b64 {{%r20, %r21}}, %d8;"
        yield elementwise(opcode, text, _bits, reads=4, writes=2)
    for opcode in ("shl.b64", "shr.u64", "shr.s64"):
        text = f"{wide} {opcode} %d8, %d6, %r12; mov.b64 {{%r20, %r21}}, %d8;"
        yield elementwise(opcode, text, _bits, reads=4, writes=2)
    for opcode in ("mul.wide.u32", "mul.wide.s32"):
        text = f"{opcode} %d8, %r10, %r11; mov.b64 {{%r20, %r21}}, %d8;"
        yield elementwise(opcode, text, _bits, reads=2, writes=2)
    text = "add.cc.u32 %r20, %r10, %r12; addc.u32 %r21, %r11, %r13;"
    yield elementwise("add.cc.u32", text, _bits, reads=4, writes=2)


def _of_warps() -> Iterator[Case]:
    for mode in ("idx", "up", "down", "bfly"):
        for bounds in (0x1F, 0, 0x1C07, 0x101F):
            text = (
                "and.b32 %r11, %r11, 31; mov.b32 %r21, 0;"
                f"shfl.sync.{mode}.b32 %r20|%p1, %r10, %r11, {bounds}, -1; @%p1 mov.b32 %r21, 1;"
            )
            yield elementwise(f"shfl.sync.{mode}.b32/{bounds:#x}", text, _bits, reads=2, writes=2)
    for operation, kind in (
        ("add", "s32"), ("add", "u32"), ("min", "s32"), ("max", "s32"), ("min", "u32"),
        ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ):  # fmt: skip
        opcode = f"redux.sync.{operation}.{kind}"
        yield elementwise(opcode, f"{opcode} %r20, %r10, -1;", _bits)
    for opcode, stored in (("any", "pred"), ("all", "pred"), ("uni", "pred"), ("ballot", "b32")):
        text = "and.b32 %r11, %r10, 3; setp.eq.s32 %p1, %r11, 1;"
        if stored == "b32":
            text += "vote.sync.ballot.b32 %r20, %p1, -1;"
        else:
            text += f"vote.sync.{opcode}.pred %p2, %p1, -1; selp.b32 %r20, 1, 0, %p2;"
        yield elementwise(f"vote.sync.{opcode}", text, _bits)
    text = "elect.sync %r20|%p1, -1; selp.b32 %r21, 1, 0, %p1;"
    yield elementwise("elect.sync", text, _bits, writes=2)
    text = """
mov.b32 %r20, 7; setp.lt.s32 %p1, %r10, 0; @%p1 bra NEGATIVE;
add.s32 %r20, %r10, 1; bra.uni TOGETHER;
NEGATIVE: xor.b32 %r20, %r10, 255;
TOGETHER: bar.warp.sync -1; shfl.sync.bfly.b32 %r20, %r20, 1, 31, -1;"""
    yield elementwise("bra", text, _bits)


def elementwise_cases() -> list[Case]:
    """Returns all of them."""
    parts: Any = (
        _approximations, _conversions, _float_arithmetic, _comparisons, _integers, _of_warps
    )  # fmt: skip
    return [case for part in parts for case in part()]
