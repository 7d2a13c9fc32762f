import numpy as np
import pytest
import torch

from handwritten_kernels import aligned, run, tensor_map
from nvgemm_aot.emulator.emulation_errors import DeadlockError, EmulationError, UnsupportedPtxError
from nvgemm_aot.emulator.instructions.tensor_cores.instruction_descriptor import (
    Kind,
    decode_instruction_descriptor,
)
from tensor_kernels import registers, run_with_tensor_memory, wait, whole

A_PLACE, B_PLACE = 1024, 33 * 1024
SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}
TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4"}
TYPES = {1: "u8", 2: "f16", 4: "f32"}


MULTIPLY = "tcgen05.mma.cta_group::1.kind::"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"


class Matrix:
    """Small integers as (rows, k), as bytes in memory, and how a descriptor finds them."""

    def __init__(self, rows, k, kind, swizzle, transposed, place, seed):
        low = 0 if kind == "u8" else -4
        numbers = np.random.default_rng(seed).integers(low, 5, (rows, k))
        self.values = numbers.astype(np.float64)
        lines = numbers.T if transposed else numbers
        encoded = torch.tensor(np.ascontiguousarray(lines)).to(TORCH[kind])
        self.size = encoded.element_size()
        self.bytes = aligned(encoded.nbytes)
        self.bytes[:] = encoded.contiguous().view(torch.uint8).numpy().reshape(-1)
        self.lines, self.line_bytes = lines.shape[0], lines.shape[1] * self.size
        self.swizzle, self.transposed, self.place = swizzle, transposed, place
        self.width = swizzle or 16

    @property
    def boxes(self):
        return self.line_bytes // self.width

    def map(self):
        """The map of bytes: a box has a swizzled row of every line."""
        return tensor_map(
            self.bytes,
            "u8",
            (self.line_bytes, self.lines),
            (self.width, self.lines),
            swizzle=self.swizzle,
        )

    def loads(self, name):
        step = self.width * self.lines
        return "".join(
            "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
            f"[smem+{self.place + number * step}], [{name}, {{{number * self.width}, 0}}], "
            "[smem+16];\n"
            for number in range(self.boxes)
        )

    def descriptor(self, slice_, depth):
        """The descriptor of a slice of k."""
        box = self.width * self.lines
        start = 1024 + self.place
        if self.transposed:
            start += slice_ * depth * self.width
            leading, stride = (box, 8 * self.width) if self.swizzle else (8 * 16, box)
        else:
            begin = slice_ * depth * self.size
            start += begin // self.width * box + begin % self.width
            leading, stride = box, 8 * self.width
        word = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46
        return word | SWIZZLES[self.swizzle] << 61


def multiply(a, b, kind, qualifiers, descriptor, depth, slices, rest=""):
    total = len(a.bytes) + len(b.bytes)
    body = f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem+16], {total};\n"
    body += a.loads("m0") + b.loads("m1") + "@!%p1 bra ISSUED;\n" + wait("smem+16", "LOADS")
    body += f"mov.b32 %r9, {descriptor};\n"
    for number in range(slices):
        body += f"mov.b64 %d10, {a.descriptor(number, depth)};\n"
        body += f"mov.b64 %d11, {b.descriptor(number, depth)};\n"
        body += f"mov.pred %p3, {int(number > 0)};\n"
        body += f"{MULTIPLY}{kind}{qualifiers} [%r3], %d10, %d11, %r9, {rest}%p3;\n"
    body += f"{COMMIT} [smem+24];\n"
    return (
        body + "ISSUED:\n" + wait("smem+24", "MULTIPLIED") + "tcgen05.fence::after_thread_sync;\n"
    )


def word(m, n, a, b, d=1, transposed=(0, 0), extra=0):
    found = d << 4 | CODES[a] << 7 | CODES[b] << 10 | transposed[0] << 15 | transposed[1] << 16
    return found | n >> 3 << 17 | m >> 4 << 24 | extra


def result_rows(cells, m):
    """D's rows where the manual's figures put them."""
    rows = np.arange(m)
    return cells[rows if m == 128 else rows // 16 * 32 + rows % 16]


CASES = [
    ("bf16", "bf16", 128, 32, 128, 128, (0, 0)),
    ("f16", "f16", 64, 8, 128, 128, (0, 0)),
    ("f16", "f16", 128, 24, 128, 128, (0, 0)),
    ("f16", "f16", 128, 64, 64, 64, (0, 0)),
    ("bf16", "bf16", 128, 16, 32, 32, (0, 0)),
    ("f16", "f16", 128, 16, 0, 0, (0, 0)),
    ("bf16", "bf16", 128, 64, 128, 128, (1, 1)),
    ("bf16", "bf16", 128, 32, 64, 32, (1, 0)),
    ("f16", "f16", 64, 16, 0, 0, (1, 1)),
    ("tf32", "tf32", 128, 32, 128, 128, (0, 0)),
    ("e4m3", "e5m2", 128, 48, 128, 64, (0, 0)),
    ("e5m2", "e4m3", 128, 64, 64, 64, (1, 1)),
]


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize(
    ("first", "second", "m", "n", "swizzle_a", "swizzle_b", "transposed"), CASES
)
def test_products_are_exact(first, second, m, n, swizzle_a, swizzle_b, transposed, delay):
    size = torch.empty(0, dtype=TORCH[first]).element_size()
    depth, slices = 32 // size, 4
    a = Matrix(m, depth * slices, first, swizzle_a, transposed[0], A_PLACE, 1)
    b = Matrix(n, depth * slices, second, swizzle_b, transposed[1], B_PLACE, 2)
    descriptor = word(m, n, first, second, transposed=transposed)
    body = multiply(a, b, KINDS[first], "", descriptor, depth, slices)
    (cells,) = run_with_tensor_memory(
        body, tensors={"a": a.bytes, "b": b.bytes}, maps=[a.map(), b.map()], delay=delay
    )
    found = result_rows(cells, m)[:, :n].view(np.float32)
    assert (found == a.values @ b.values.T).all()


@pytest.mark.parametrize(("first", "second"), [("s8", "s8"), ("u8", "s8")])
def test_integers_multiply_to_32_bits(first, second):
    a = Matrix(128, 64, first, 64, 0, A_PLACE, 1)
    b = Matrix(32, 64, second, 64, 0, B_PLACE, 2)
    body = multiply(a, b, "i8", "", word(128, 32, first, second, d=2), 32, 2)
    (cells,) = run_with_tensor_memory(
        body, tensors={"a": a.bytes, "b": b.bytes}, maps=[a.map(), b.map()]
    )
    assert (cells[:, :32].view(np.int32) == a.values @ b.values.T).all()


def simple(qualifiers="", descriptor=None, rest="", kind="f16", replace=(), element="bf16"):
    a = Matrix(128, 64, element, 128, 0, A_PLACE, 1)
    b = Matrix(32, 64, element, 128, 0, B_PLACE, 2)
    if descriptor is None:
        descriptor = word(128, 32, element, element)
    body = multiply(a, b, kind, qualifiers, descriptor, 16, 4, rest)
    for old, new in replace:
        assert old in body, old
        body = body.replace(old, new)
    arguments = {"tensors": {"a": a.bytes, "b": b.bytes}, "maps": [a.map(), b.map()]}
    return body, arguments, a.values @ b.values.T


def test_accumulators_can_have_16_bits_and_operands_be_negated():
    body, arguments, wanted = simple(
        ".collector::a::fill", word(128, 32, "f16", "f16", d=0, extra=1 << 13), element="f16"
    )
    (cells,) = run_with_tensor_memory(body, **arguments)
    assert (cells[:, :32].astype(np.uint16).view(np.float16) == -wanted).all()


def test_disabled_lanes_keep_what_they_hold():
    masks = "{%r30, %r31, %r32, %r33}, "
    setup = "mov.b32 %r30, 0;\nmov.b32 %r31, -1;\nmov.b32 %r32, 0;\nmov.b32 %r33, 1;\n"
    body, arguments, wanted = simple(rest=masks)
    (cells,) = run_with_tensor_memory(setup + body, **arguments)
    found = cells[:, :32].view(np.float32)
    written = np.r_[0:32, 64:96, 97:128]
    assert (found[written] == wanted[written]).all()
    assert np.isnan(np.delete(found, written, axis=0)).all()


def test_scaled_accumulator_is_divided_by_a_power_of_two():
    body, arguments, _ = simple()
    halved = body.replace(", %p3;", ", %p3, 1;")
    (once,) = run_with_tensor_memory(body.replace("%p3, 1;", "%p3, 0;"), **arguments)
    (cells,) = run_with_tensor_memory(halved, **arguments)
    a = Matrix(128, 64, "bf16", 128, 0, A_PLACE, 1).values
    b = Matrix(32, 64, "bf16", 128, 0, B_PLACE, 2).values
    sums = np.zeros((128, 32))
    for k in range(0, 64, 16):
        sums = sums / 2 + a[:, k : k + 16] @ b[:, k : k + 16].T
    assert (cells[:, :32].view(np.float32) == sums).all()
    assert (once != cells).any()


@pytest.mark.parametrize(
    ("kind", "blocks", "n", "extra", "allowed"),
    [
        (Kind.F16, 1, 8, 0, True),
        (Kind.F16, 2, 24, 0, False),
        (Kind.I8, 1, 24, 2 << 4, True),
        (Kind.I8, 1, 40, 2 << 4, False),
        (Kind.I8, 2, 48, 2 << 4, False),
        (Kind.I8, 2, 64, 2 << 4, True),
        (Kind.F8F6F4, 1, 24, 0, True),
        (Kind.F8F6F4, 1, 24, 1 << 16, False),
        (Kind.F8F6F4, 2, 48, 1 << 16, False),
        (Kind.F8F6F4, 2, 64, 1 << 16, True),
        (Kind.F16, 1, 24, 1 << 16, True),
    ],
)
def test_columns_are_those_of_the_kind_and_group(kind, blocks, n, extra, allowed):
    descriptor = word(128, n, "f16", "f16", d=0 if kind is Kind.I8 else 1, extra=extra)
    if allowed:
        assert decode_instruction_descriptor(descriptor, kind, blocks).n == n
    else:
        with pytest.raises(EmulationError, match=f"N is {n}"):
            decode_instruction_descriptor(descriptor, kind, blocks)


@pytest.mark.parametrize(("element", "swizzle"), [("tf32", 128), ("bf16", "atoms")])
def test_rejects_transposition_in_another_swizzling_mode(element, swizzle):
    kind = KINDS[element]
    a = Matrix(128, 64, element, 128, 0, A_PLACE, 1)
    b = Matrix(32, 64, element, 128, 0, B_PLACE, 2)
    body = multiply(a, b, kind, "", word(128, 32, element, element, transposed=(0, 1)), 8, 1)
    if swizzle == "atoms":
        layout = b.descriptor(0, 8)
        body = body.replace(f"%d11, {layout}", f"%d11, {layout ^ (2 ^ 1) << 61}")
    with pytest.raises(EmulationError, match=f"B of {element} is transposed with swizzling mode"):
        run_with_tensor_memory(body, tensors={"a": a.bytes, "b": b.bytes}, maps=[a.map(), b.map()])


def test_a_can_lie_in_tensor_memory():
    a = Matrix(128, 16, "bf16", 32, 0, A_PLACE, 1)
    _, arguments, _ = simple()
    words = a.bytes.view(np.uint32).reshape(128, 8)
    b = Matrix(32, 64, "bf16", 128, 0, B_PLACE, 2)
    loads = "".join(f"mov.b32 %r{40 + n}, {int(words[0, n])};\n" for n in range(8))
    store = (
        loads
        + f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r5+64], {registers(8, 40)};\n"
        + "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        + "tcgen05.fence::after_thread_sync;\nadd.u32 %r8, %r3, 64;\n"
    )
    one = multiply(
        Matrix(128, 64, "bf16", 128, 0, A_PLACE, 1),
        b,
        "f16",
        "",
        word(128, 32, "bf16", "bf16"),
        16,
        1,
    )
    (cells,) = run_with_tensor_memory(store + one.replace("], %d10,", "], [%r8],"), **arguments)
    wanted = a.values[:1] @ b.values[:, :16].T
    assert (cells[:, :32].view(np.float32) == wanted).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qualifiers": ".ashift"}, UnsupportedPtxError, "ashift"),
        ({"kind": "f8"}, UnsupportedPtxError, "kind::f8"),
        ({"replace": [("mma.cta", "mma.sp.cta")]}, UnsupportedPtxError, "sp"),
        ({"replace": [("mma.cta", "mma.ws.cta")]}, UnsupportedPtxError, "ws"),
        ({"replace": [(", %p3;", ";")]}, UnsupportedPtxError, "operands"),
        ({"rest": "{%r30, %r31}, "}, UnsupportedPtxError, "2 lane masks"),
        ({"descriptor": word(128, 0, "bf16", "bf16")}, EmulationError, "N is 0"),
        ({"descriptor": word(128, 32, "bf16", "bf16", d=0)}, EmulationError, "type of D is 0"),
        ({"descriptor": word(256, 32, "bf16", "bf16")}, EmulationError, "M is 256"),
        ({"descriptor": word(128, 32, "bf16", "tf32")}, EmulationError, "type of B is 2"),
        ({"descriptor": word(128, 32, "bf16", "bf16", d=2)}, EmulationError, "type of D is 2"),
        ({"descriptor": word(128, 32, "bf16", "bf16", extra=4)}, EmulationError, "sparsity is 1"),
        ({"descriptor": word(128, 32, "bf16", "bf16", extra=8)}, EmulationError, "saturation"),
        ({"descriptor": word(128, 32, "bf16", "bf16", extra=1 << 6)}, EmulationError, "reserved"),
        ({"replace": [("mov.b64 %d10, ", "mov.b64 %d10, 1")]}, EmulationError, "descriptor"),
        (
            {"replace": [("mov.b64 %d11, ", "mov.b64 %d11, 70368744177664; //")]},
            EmulationError,
            "reads a matrix at",
        ),
        (
            {"replace": [("kind::f16 [%r3]", "kind::f16 [%r3+112]")]},
            EmulationError,
            "columns 112 to 143",
        ),
        (
            {"replace": [("kind::f16 [%r3]", "kind::f16 [%r3+1048576]")]},
            EmulationError,
            "begins at lane 16",
        ),
        (
            {"replace": [("%d10, %d11", "[%r3+1048576], %d11")]},
            EmulationError,
            "A begins at lane 16 of tensor memory, must begin at 0",
        ),
        (
            {"replace": [(f"{COMMIT} [smem+24]", f"{COMMIT} [smem+16]")]},
            DeadlockError,
            "offset 24",
        ),
    ],
)
def test_rejects(changes, error, message):
    body, arguments, _ = simple(**changes)
    cells = aligned(128 * 64, np.uint32)
    arguments["tensors"]["cells"] = cells
    with pytest.raises(error, match=message):
        run(whole(body), **arguments, pointers=[cells], threads=128, shared=131072)
