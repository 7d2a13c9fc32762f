"""Cases of atomics, matrix loads and stores, bulk copies and stores that complete at a barrier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.emulation.hopper.instruction_case import Case, Random, TensorMapSpec

_THREADS = 64
_PLACES = 8
"""Addresses at which the threads meet."""

_U8, _U16, _F32, _BF16 = 0, 1, 7, 9
"""Values of `CUtensorMapDataType`."""

_FLOATS = {"f32": np.float32, "f64": np.float64, "f16x2": np.float16, "bf16x2": np.float32}


def _whole_numbers(kind: str, random: Random, count: int) -> npt.NDArray[Any]:
    """Returns values whose sums are exact in any order, as the bytes of a type."""
    if kind in _FLOATS:
        halves = 2 if kind.endswith("x2") else 1
        values = random.integers(-8, 9, halves * count).astype(_FLOATS[kind])
        if kind == "bf16x2":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values
    size = np.uint64 if kind.endswith("64") else np.uint32
    values = random.integers(0, 1 << 20, count).astype(size)
    return np.where(random.random(count) < 0.3, ~values, values)


def _atomic(space: str, operation: str, kind: str, *, returns: bool, semantics: str = "") -> Case:
    """Returns a case in which threads meet (``red``), or each has its place and an old value.

    The input holds the memory's first content, then the values; the output its last content, then
    what the instruction returned.
    """
    size = 8 if kind.endswith("64") else 4
    registers = "%d" if size == 8 else "%r"
    bits = f"b{8 * size}"
    places = _THREADS if returns else _PLACES
    where = "%r0" if returns else "%r7"
    address = {"global": "%d12", "shared": "%r20", "shared::cta": "%r20"}[space]
    value, other, old = f"{registers}30", f"{registers}31", f"{registers}32"
    operands = f"[{address}], {value}" + (f", {other}" if operation == "cas" else "")
    noftz = "noftz." if kind.endswith("x2") else ""
    full = f"{semantics}{space}.{operation}.{noftz}{kind}"
    text = f"atom.{full} {old}, {operands};" if returns else f"red.{full} {operands};"
    first = f"mul.wide.u32 %d13, %r0, {size}; add.s64 %d14, %d0, %d13; add.s64 %d15, %d1, %d13;"
    prefill = (
        f"setp.lt.u32 %p1, %r0, {places}; @%p1 ld.global.{bits} {registers}33, [%d14];"
        f"@%p1 st.global.{bits} [%d15], {registers}33;"
    )
    if space != "global":
        prefill = (
            f"setp.lt.u32 %p1, %r0, {places}; @%p1 ld.global.{bits} {registers}33, [%d14];"
            f"mad.lo.s32 %r21, %r0, {size}, %r4; @%p1 st.shared.{bits} [%r21], {registers}33;"
        )
    after = ""
    if space != "global":
        after = (
            f"bar.sync 0; @%p1 ld.shared.{bits} {registers}33, [%r21];"
            f"@%p1 st.global.{bits} [%d15], {registers}33;"
        )
    body = f"""
{first} and.b32 %r7, %r0, {_PLACES - 1};
{prefill} bar.sync 0;
mul.wide.u32 %d16, {where}, {size}; add.s64 %d12, %d1, %d16;
mad.lo.s32 %r20, {where}, {size}, %r4;
ld.global.{bits} {value}, [%d14+{size * _THREADS}]; \
ld.global.{bits} {other}, [%d14+{size * 2 * _THREADS}];
{text}
{after}
""" + (f"st.global.{bits} [%d15+{size * _THREADS}], {old};" if returns else "")

    def make(random: Random) -> npt.NDArray[Any]:
        if operation in ("inc", "dec"):
            memory = random.integers(0, 12, _THREADS).astype(np.uint32)
            limits = np.full(2 * _THREADS, 9, np.uint32)
            return np.concatenate([memory, limits])
        memory = _whole_numbers(kind, random, _THREADS)
        values = _whole_numbers(kind, random, 2 * _THREADS)
        if operation == "cas":  # half of the comparisons hold
            holds = random.random(_THREADS) < 0.5
            values[:_THREADS] = np.where(holds, memory, values[:_THREADS])
        return np.concatenate([memory, values])

    return Case(
        name=f"{'atom' if returns else 'red'}.{full}",
        body=body,
        make=make,
        output_bytes=size * _THREADS * (2 if returns else 1),
        threads=_THREADS,
    )


def _atomics() -> Iterator[Case]:
    together = [
        ("add", "u32"), ("add", "s32"), ("add", "u64"), ("add", "f32"), ("add", "f64"),
        ("add", "f16x2"), ("add", "bf16x2"), ("inc", "u32"), ("dec", "u32"), ("min", "s32"),
        ("min", "u32"), ("max", "s32"), ("max", "u32"), ("min", "s64"), ("max", "u64"),
        ("and", "b32"), ("or", "b32"), ("xor", "b32"), ("and", "b64"), ("or", "b64"),
        ("xor", "b64"),
    ]  # fmt: skip
    for operation, kind in together:
        for space in ("global", "shared"):
            for returns in (False, True):
                yield _atomic(space, operation, kind, returns=returns)
    for operation in ("exch", "cas"):
        for kind in ("b32", "b64"):
            for space in ("global", "shared"):
                yield _atomic(space, operation, kind, returns=True)
    yield _atomic("global", "add", "u32", returns=True, semantics="acq_rel.gpu.")
    yield _atomic("global", "add", "s32", returns=False, semantics="release.gpu.")
    yield _atomic("shared::cta", "add", "u32", returns=True, semantics="relaxed.cta.")


def _vector_reductions() -> Iterator[Case]:
    for count in (2, 4):
        registers = ", ".join(f"%r{30 + place}" for place in range(count))
        size = 4 * count
        body = f"""
and.b32 %r7, %r0, {_PLACES - 1}; setp.lt.u32 %p1, %r0, {_PLACES};
mul.wide.u32 %d13, %r0, {size}; add.s64 %d14, %d0, %d13; add.s64 %d15, %d1, %d13;
@%p1 ld.global.v{count}.b32 {{{registers}}}, [%d14];
@%p1 st.global.v{count}.b32 [%d15], {{{registers}}};
bar.sync 0;
ld.global.v{count}.b32 {{{registers}}}, [%d14+{size * _PLACES}];
mul.wide.u32 %d16, %r7, {size}; add.s64 %d12, %d1, %d16;
red.relaxed.gpu.global.add.v{count}.f32 [%d12], {{{registers}}};
"""
        yield Case(
            name=f"red.relaxed.gpu.global.add.v{count}.f32",
            body=body,
            make=lambda random, count=count: _whole_numbers(  # type: ignore[misc]
                "f32", random, count * (_THREADS + _PLACES)
            ),
            output_bytes=size * _PLACES,
            threads=_THREADS,
        )


def _matrix_moves() -> Iterator[Case]:
    for count in (1, 2, 4):
        registers = ", ".join(f"%r{30 + place}" for place in range(count))
        for trans in ("", ".trans"):
            load = f"""
mul.wide.u32 %d10, %r0, 16; add.s64 %d2, %d0, %d10; mad.lo.s32 %r5, %r0, 16, %r4;
ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d2];
st.shared.v4.b32 [%r5], {{%r20, %r21, %r22, %r23}};
bar.warp.sync -1;
mul.lo.s32 %r6, %r0, 11; and.b32 %r6, %r6, 31; mad.lo.s32 %r6, %r6, 16, %r4;
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r6];
mul.wide.u32 %d10, %r0, {4 * count}; add.s64 %d3, %d1, %d10;
""" + "\n".join(f"st.global.b32 [%d3+{4 * p}], %r{30 + p};" for p in range(count))
            yield Case(
                name=f"ldmatrix.x{count}{trans}",
                body=load,
                make=lambda random: random.integers(0, 256, 512, dtype=np.uint8),
                output_bytes=128 * count,
                threads=32,
            )
            store = f"""
mul.wide.u32 %d10, %r0, 16; add.s64 %d2, %d0, %d10; add.s64 %d3, %d1, %d10;
mad.lo.s32 %r5, %r0, 16, %r4; mov.b32 %r24, 0;
st.shared.v4.b32 [%r5], {{%r24, %r24, %r24, %r24}};
ld.global.v4.b32 {{%r30, %r31, %r32, %r33}}, [%d2];
bar.warp.sync -1;
mul.lo.s32 %r6, %r0, 11; and.b32 %r6, %r6, 31; mad.lo.s32 %r6, %r6, 16, %r4;
stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6], {{{registers}}};
bar.warp.sync -1;
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r5];
st.global.v4.b32 [%d3], {{%r20, %r21, %r22, %r23}};
"""
            yield Case(
                name=f"stmatrix.x{count}{trans}",
                body=store,
                make=lambda random: random.integers(0, 256, 512, dtype=np.uint8),
                output_bytes=512,
                threads=32,
            )


_WAIT = """
WAIT: mbarrier.try_wait.parity.shared.b64 %p7, [%r8], 0; @%p7 bra ARRIVED; bra.uni WAIT;
ARRIVED:
"""
"""Waits for the first phase of the barrier whose address is in ``%r8``."""

_BARRIER = 60000
"""Place of the barrier, behind the data."""


def _begin(count: int) -> str:
    """Makes the barrier in ``%r8`` for a number of arrivals."""
    return f"""
add.s32 %r8, %r4, {_BARRIER}; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r8], {count};
@%p1 fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;
"""


def _copy_out(size: int) -> str:
    """Copies shared memory to the output, 16 bytes a thread and step."""
    step = 16 * _THREADS
    lines = ["mul.wide.u32 %d20, %r0, 16; add.s64 %d21, %d1, %d20; mad.lo.s32 %r9, %r0, 16, %r4;"]
    for at in range(0, size, step):
        lines.append(
            f"add.s32 %r20, %r0, {at // 16}; setp.lt.u32 %p9, %r20, {size // 16};"
            f"@%p9 ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r9+{at}];"
            f"@%p9 st.global.v4.b32 [%d21+{at}], {{%r30, %r31, %r32, %r33}};"
        )
    return "\n".join(lines)


def _copy_in(size: int) -> str:
    """Copies the input to shared memory, for bulk copies from there."""
    step = 16 * _THREADS
    lines = ["mul.wide.u32 %d20, %r0, 16; add.s64 %d22, %d0, %d20; mad.lo.s32 %r9, %r0, 16, %r4;"]
    for at in range(0, size, step):
        lines.append(
            f"add.s32 %r20, %r0, {at // 16}; setp.lt.u32 %p9, %r20, {size // 16};"
            f"@%p9 ld.global.v4.b32 {{%r30, %r31, %r32, %r33}}, [%d22+{at}];"
            f"@%p9 st.shared.v4.b32 [%r9+{at}], {{%r30, %r31, %r32, %r33}};"
        )
    lines.append("fence.proxy.async; bar.sync 0;")
    return "\n".join(lines)


def _tiles() -> Iterator[tuple[str, TensorMapSpec, tuple[int, ...]]]:
    """Yields maps of the input, and the coordinates of a copy."""
    for swizzle, name in enumerate(("plain", "32", "64", "128")):
        row = (128, 32, 64, 128)[swizzle]
        flat = {"sizes": (200, 40), "strides": (208,), "box": (row, 24)}
        for at in ((0, 0), (80, 30), (-16, -5)):
            spec = TensorMapSpec(buffer="input", type=_U8, swizzle=swizzle, **flat)  # type: ignore[arg-type]
            yield f"2d/u8/{name}/{at}", spec, at
        spec = TensorMapSpec(
            buffer="input", type=_BF16, sizes=(72, 20, 3), strides=(144, 2880),
            box=(row // 2, 16, 2), swizzle=swizzle,
        )  # fmt: skip
        yield f"3d/bf16/{name}", spec, (8, 5, 2)
        spec = TensorMapSpec(
            buffer="input", type=_F32, sizes=(28, 5, 6, 4), strides=(112, 560, 3360),
            box=(row // 4, 3, 2, 2), swizzle=swizzle, fills_nan=True,
        )  # fmt: skip
        yield f"4d/f32/{name}", spec, (4, 3, 5, 1)


_BUFFER = 16 * 1024


def _tensor_copies() -> Iterator[Case]:
    sizes = {_U8: 1, _BF16: 2, _F32: 4}
    for name, spec, at in _tiles():
        size = int(np.prod(spec.box)) * sizes[spec.type]
        rank = len(at)
        place = ", ".join(f"%r{40 + d}" for d in range(rank))
        coordinates = "".join(f"mov.b32 %r{40 + d}, {value};" for d, value in enumerate(at))
        load = f"""
{_begin(1)} {coordinates}
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {size};
@%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes \
[%r4], [%d40, {{{place}}}], [%r8];
{_WAIT} {_copy_out(size)}
"""
        yield Case(
            name=f"tensor load/{name}",
            body=load.replace("shared::cta.global", "shared::cluster.global"),
            make=lambda random: random.integers(0, 256, _BUFFER, dtype=np.uint8),
            output_bytes=size,
            threads=_THREADS,
            maps=(spec,),
        )
        to = TensorMapSpec(**{**spec.__dict__, "buffer": "output", "fills_nan": False})
        for suffix in ("", ".add") if spec.type != _U8 else ("",):
            opcode = "cp.async.bulk.tensor" if not suffix else "cp.reduce.async.bulk.tensor"
            store = f"""
setp.eq.u32 %p1, %r0, 0; {coordinates} {_copy_in(size)}
@%p1 {opcode}.{rank}d.global.shared::cta{suffix}.tile.bulk_group [%d40, {{{place}}}], [%r4];
@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
"""
            kind = {_BF16: "bf16x2", _F32: "f32"}.get(spec.type, "u32")
            if suffix and spec.type == _BF16:
                continue  # 0xAAAA, with which the output is filled, is too small to be added
            yield Case(
                name=f"tensor store{suffix}/{name}",
                body=store,
                make=lambda random, kind=kind: _whole_numbers(  # type: ignore[misc]
                    kind, random, _BUFFER // 4
                ),
                output_bytes=_BUFFER,
                threads=_THREADS,
                maps=(to,),
            )


def _bulk_copies() -> Iterator[Case]:
    size = 1040
    yield Case(
        name="cp.async.bulk to shared memory",
        body=f"""
{_begin(1)}
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {size};
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%d0], {size}, [%r8];
{_WAIT} {_copy_out(size)}
""",
        make=lambda random: random.integers(0, 256, 2048, dtype=np.uint8),
        output_bytes=size,
        threads=_THREADS,
    )
    yield Case(
        name="cp.async.bulk from shared memory",
        body=f"""
setp.eq.u32 %p1, %r0, 0; {_copy_in(size)}
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r4], {size};
@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
""",
        make=lambda random: random.integers(0, 256, 2048, dtype=np.uint8),
        output_bytes=2048,
        threads=_THREADS,
    )
    yield Case(
        name="cp.async",
        body="""
mul.wide.u32 %d20, %r0, 16; add.s64 %d22, %d0, %d20; mad.lo.s32 %r9, %r0, 16, %r4;
and.b32 %r20, %r0, 15;
cp.async.cg.shared.global [%r9], [%d22], 16, %r20;
cp.async.ca.shared.global [%r9+1024], [%d22+1024], 8;
cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
add.s64 %d21, %d1, %d20;
ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r9]; \
st.global.v4.b32 [%d21], {%r30, %r31, %r32, %r33};
ld.shared.v2.b32 {%r30, %r31}, [%r9+1024]; st.global.v2.b32 [%d21+1024], {%r30, %r31};
""",
        make=lambda random: random.integers(0, 256, 2048, dtype=np.uint8),
        output_bytes=2048,
        threads=_THREADS,
    )


_MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def _cluster_stores() -> Iterator[Case]:
    """Two blocks send to each other, and wait for what they get."""
    peer = (
        "mov.u32 %r50, %cluster_ctarank; xor.b32 %r51, %r50, 1;"
        "mapa.shared::cluster.u32 %r52, %r4, %r51; mapa.shared::cluster.u32 %r53, %r8, %r51;"
    )
    inputs = "mul.wide.u32 %d20, %r3, 16; add.s64 %d22, %d0, %d20; add.s64 %d23, %d1, %d20;"
    for count, kind in ((1, "b32"), (2, "b32"), (4, "s32"), (1, "b64"), (2, "s64")):
        size = count * (8 if kind.endswith("64") else 4)
        registers = "%d" if kind.endswith("64") else "%r"
        names = ", ".join(f"{registers}{30 + place}" for place in range(count))
        vector = "" if count == 1 else f".v{count}"
        listed = names if count == 1 else f"{{{names}}}"
        bits = f"b{8 * size // count}"
        yield Case(
            name=f"st.async{vector}.{kind}",
            body=f"""
{_begin(1)} {peer} {inputs}
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {size * _THREADS};
{_MEET}
ld.global{vector}.{bits} {listed}, [%d22];
mad.lo.s32 %r54, %r0, 16, %r52;
st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.{kind} [%r54], {listed}, [%r53];
{_WAIT}
mad.lo.s32 %r9, %r0, 16, %r4;
ld.shared{vector}.{bits} {listed}, [%r9]; st.global{vector}.{bits} [%d23], {listed};
{_MEET}
""",
            make=lambda random: random.integers(0, 256, 32 * _THREADS, dtype=np.uint8),
            output_bytes=32 * _THREADS,
            threads=_THREADS,
            blocks=2,
            cluster=2,
        )
    operations = [
        ("add", "u32"), ("add", "s32"), ("add", "u64"), ("inc", "u32"), ("dec", "u32"),
        ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ]  # fmt: skip
    for operation, kind in operations:
        size = 8 if kind.endswith("64") else 4
        registers = "%d" if size == 8 else "%r"
        bits = f"b{8 * size}"
        yield Case(
            name=f"red.async.{operation}.{kind}",
            body=f"""
{_begin(1)} {peer} {inputs}
mad.lo.s32 %r9, %r0, 16, %r4; ld.global.{bits} {registers}30, [%d22];
st.shared.{bits} [%r9], {registers}30;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {size * _THREADS};
{_MEET}
and.b32 %r55, %r0, {_PLACES - 1}; mad.lo.s32 %r54, %r55, 16, %r52;
ld.global.{bits} {registers}31, [%d22+8];
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{kind} \
[%r54], {registers}31, [%r53];
{_WAIT}
ld.shared.{bits} {registers}30, [%r9]; st.global.{bits} [%d23], {registers}30;
{_MEET}
""",
            make=(lambda random: random.integers(0, 12, 8 * _THREADS).astype(np.uint32))
            if operation not in ("inc", "dec")
            else (lambda random: np.full(8 * _THREADS, 9, np.uint32)),
            output_bytes=32 * _THREADS,
            threads=_THREADS,
            blocks=2,
            cluster=2,
        )
    spec = TensorMapSpec(
        buffer="input", type=_BF16, sizes=(64, 32), strides=(128,), box=(64, 16), swizzle=3
    )
    yield Case(
        name="tensor load/multicast",
        body=f"""
{_begin(1)} {peer} mov.b32 %r40, 0; shl.b32 %r41, %r50, 4; mov.b16 %h1, 3;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 4096;
{_MEET}
shl.b32 %r42, %r50, 11; add.s32 %r42, %r42, %r4;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\
.multicast::cluster \
[%r42], [%d40, {{%r40, %r41}}], [%r8], %h1;
{_WAIT}
mul.wide.u32 %d24, %r50, 4096; add.s64 %d1, %d1, %d24;
{_copy_out(4096)} {_MEET}
""",
        make=lambda random: random.integers(0, 256, 4096, dtype=np.uint8),
        output_bytes=8192,
        threads=_THREADS,
        blocks=2,
        cluster=2,
        maps=(spec,),
    )


def memory_cases() -> list[Case]:
    """Returns all of them."""
    parts: Any = (
        _atomics, _vector_reductions, _matrix_moves, _tensor_copies, _bulk_copies, _cluster_stores
    )  # fmt: skip
    return [case for part in parts for case in part()]
