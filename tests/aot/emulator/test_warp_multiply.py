"""Multiplications of one warp, against sums over elements placed as the PTX ISA says."""

import re

import numpy as np
import pytest

from handwritten_kernels import aligned, run
from nvgemm_aot.emulator.emulation_errors import EmulationError, UnsupportedPtxError
from nvgemm_aot.emulator.instructions.tensor_cores.element_formats import E4M3, E5M2

LANES = range(32)

TO_VALUES = {
    "f16": lambda data: data.view(np.float16),
    "bf16": lambda data: (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    "tf32": lambda data: (data.view(np.uint32) & 0xFFFF_E000).view(np.float32),
    "f32": lambda data: data.view(np.float32),
    "e4m3": lambda data: E4M3[data],
    "e5m2": lambda data: E5M2[data],
    "u8": lambda data: data.view(np.uint8),
    "s8": lambda data: data.view(np.int8),
    "s32": lambda data: data.view(np.int32),
}
"""Values of bytes."""

SMALL = {
    "f16": lambda values: values.astype(np.float16),
    "bf16": lambda values: (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    "tf32": lambda values: values.astype(np.float32),
    "f32": lambda values: values.astype(np.float32),
    "e4m3": lambda values: np.nanargmin(np.abs(E4M3 - values[:, None]), 1).astype(np.uint8),
    "e5m2": lambda values: np.nanargmin(np.abs(E5M2 - values[:, None]), 1).astype(np.uint8),
    "u8": lambda values: np.abs(values).astype(np.uint8),
    "s8": lambda values: values.astype(np.int8),
    "s32": lambda values: values.astype(np.int32),
}
"""Elements of whole numbers from -2 to 2, which all types hold."""


def fragments(kind, registers, random):
    """Returns registers of all lanes as bytes ``(lane, register, byte)`` and their values."""
    bits = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32}.get(kind, 8)
    values = random.integers(-2, 3, 32 * registers * 32 // bits).astype(float)
    with np.errstate(invalid="ignore"):
        data = SMALL[kind](values).view(np.uint8).reshape(32, registers, 4)
    return data, TO_VALUES[kind](data.reshape(-1)).reshape(32, registers, -1).astype(float)


def matrices(a, b, c, k):
    """Returns A, B and C from values by lane and register (PTX ISA, "Matrix Fragments for mma")."""
    first, second, sums = np.zeros((16, k)), np.zeros((k, 8)), np.zeros((16, 8))
    each = a.shape[-1]
    for lane in LANES:
        group, place = lane >> 2, lane % 4
        for register in range(a.shape[1]):
            row = group + 8 * (register % 2)
            column = place * each + 4 * each * (register // 2)
            first[row, column : column + each] = a[lane, register]
        for register in range(b.shape[1]):
            row = place * each + 4 * each * register
            second[row : row + each, group] = b[lane, register]
        for number, value in enumerate(c[lane].reshape(-1)):
            sums[group + 8 * (number // 2), place * 2 + number % 2] = value
    return first, second, sums


def multiply(shape, types, a, b, c, *, target="sm_90a"):
    """Returns the bytes of D by lane and register."""
    given = np.concatenate([each.reshape(32, -1) for each in (a, b, c)], 1)
    source, result = aligned(given.size), aligned(c.size)
    source[:] = given.reshape(-1)
    counts = [each.shape[1] for each in (c, a, b, c)]
    vectors = [
        "{" + ", ".join(f"%r{20 + 10 * place + i}" for i in range(count)) + "}"
        for place, count in enumerate(counts)
    ]
    loads, offset = [], 0
    for place, count in enumerate(counts[1:], 1):
        for i in range(count):
            loads.append(f"ld.global.b32 %r{20 + 10 * place + i}, [%d0+{offset}];")
            offset += 4
    body = f"""
ld.param.u64 %d0, [a0]; ld.param.u64 %d1, [a1]; mov.u32 %r0, %tid.x;
mul.wide.u32 %d2, %r0, {offset}; add.s64 %d0, %d0, %d2;
mul.wide.u32 %d2, %r0, {4 * counts[0]}; add.s64 %d1, %d1, %d2;
{" ".join(loads)}
mma.sync.aligned.{shape}.row.col.{types} {", ".join(vectors)};
""" + "\n".join(f"st.global.b32 [%d1+{4 * i}], %r{20 + i};" for i in range(counts[0]))
    tensors = {"source": source, "result": result}
    run(body, tensors=tensors, pointers=[source, result], target=target)
    return result.reshape(32, -1)


@pytest.mark.parametrize(
    ("a", "b", "accumulator"),
    [
        ("f16", "f16", "f32"),
        ("f16", "f16", "f16"),
        ("bf16", "bf16", "f32"),
        ("tf32", "tf32", "f32"),
        ("e4m3", "e5m2", "f32"),
        ("e5m2", "e5m2", "f16"),
        ("s8", "u8", "s32"),
        ("u8", "u8", "s32"),
    ],
)
@pytest.mark.parametrize("registers", [1, 2])
def test_elements_lie_where_the_manual_says(a, b, accumulator, registers):
    random = np.random.default_rng(registers)
    (a_data, a_values), (b_data, b_values), (c_data, c_values) = (
        fragments(kind, count, random)
        for kind, count in (
            (a, 2 * registers),
            (b, registers),
            (accumulator, 2 if accumulator == "f16" else 4),
        )
    )
    k = 4 * registers * a_values.shape[-1]
    types = f"{accumulator}.{a}.{b}.{accumulator}"
    found = multiply(f"m16n8k{k}", types, a_data, b_data, c_data)
    first, second, sums = matrices(a_values, b_values, c_values, k)
    result = TO_VALUES[accumulator](found.reshape(-1)).reshape(32, c_data.shape[1], -1)
    assert (matrices(a_values, b_values, result.astype(float), k)[2] == first @ second + sums).all()


@pytest.mark.parametrize(
    ("shape", "types", "named"),
    [
        ("m16n8k32", "f32.f16.f16.f32", "shape .m16n8k32 of .f16"),
        ("m8n8k4", "f32.f16.f16.f32", "shape .m8n8k4"),
        ("m16n8k16", "f16.bf16.bf16.f16", "D of .f16 for A of .bf16"),
        ("m16n8k16", "satfinite.f32.f16.f16.f32", "D of .f32"),
        ("m16n8k16", "f32.f16.bf16.f32", "qualifier .bf16"),
        ("m16n8k16", "f32.f16.f16.f16", "qualifier .f16"),
        ("m16n8k8", "f32.f16.f16.f32", "a vector of 4, must have 2 registers"),
    ],
)
def test_names_what_it_does_not_know(shape, types, named):
    a, b, c = (np.zeros((32, count, 4), np.uint8) for count in (4, 2, 4))
    with pytest.raises(UnsupportedPtxError, match=re.escape(named)):
        multiply(shape, types, a, b, c)


def test_all_lanes_must_run_it():
    body = """
mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 16; mov.b32 %r1, 0;
@%p1 mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r2, %r3, %r4, %r5}, {%r1, %r1}, {%r1}, \
{%r1, %r1, %r1, %r1};
"""
    with pytest.raises(EmulationError, match="runs in 16 lanes of a warp, must run in all 32"):
        run(body)
    run(body.replace("@%p1 ", ""))
