"""Problems and signatures: what a GEMM is, with and without its sizes.

A signature is what a compiled kernel is specialised on; a problem is a signature plus sizes. Both
are frozen, hashable, ordered by their text key, and their keys parse back to equal values.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass


class Op(str, enum.Enum):
    """The operation, by torch's name: ``mm`` takes matrices, ``bmm`` a batch of them."""

    MM = "mm"
    BMM = "bmm"


class DType(str, enum.Enum):
    """Element type of an operand."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _FACTS[self][0]

    @property
    def torch_name(self) -> str:
        """Name by which torch, TVM-FFI and the launchers of CuTe-DSL kernels know it."""
        return _FACTS[self][1]

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers, so that products accumulate in int32."""
        return self in (DType.INT32, DType.INT8, DType.UINT8)


_FACTS = {
    DType.FP32: (4, "float32"),
    DType.FP16: (2, "float16"),
    DType.BF16: (2, "bfloat16"),
    DType.FP8_E4M3: (1, "float8_e4m3fn"),
    DType.FP8_E5M2: (1, "float8_e5m2"),
    DType.INT32: (4, "int32"),
    DType.INT8: (1, "int8"),
    DType.UINT8: (1, "uint8"),
}
"""By element type: bytes, and torch's name."""


class Layout(str, enum.Enum):
    """Majors of A and B in BLAS letters; the output is always row-major.

    ``t`` is row-major (the last dimension is contiguous), ``n`` is column-major. A is m x k and B
    is k x n, so ``tn`` means that k is contiguous in both: the layout of ``torch.nn.Linear``.
    """

    TN = "tn"
    TT = "tt"
    NN = "nn"
    NT = "nt"

    @property
    def a_row_major(self) -> bool:
        """Whether A (m x k) is contiguous along k."""
        return self.value[0] == "t"

    @property
    def b_row_major(self) -> bool:
        """Whether B (k x n) is contiguous along n."""
        return self.value[1] == "t"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a kernel is specialised on: it serves problems of its signature and alignment.

    Attributes:
        op: The operation; it fixes the rank of the operands (mm: 2, bmm: 3).
        layout: Majors of A and B.
        a, b: Element types of A and B.
        accumulator: Element type in which products are summed.
        out: Element type of the result.
    """

    op: Op
    layout: Layout
    a: DType
    b: DType
    accumulator: DType
    out: DType

    @property
    def key(self) -> str:
        """Canonical text, e.g. ``mm/tn/bf16xbf16/fp32/bf16``."""
        return (
            f"{self.op.value}/{self.layout.value}/{self.a.value}x{self.b.value}"
            f"/{self.accumulator.value}/{self.out.value}"
        )

    @classmethod
    @functools.lru_cache(maxsize=1024)  # a bundle names few signatures, thousands of times
    def parse(cls, key: str) -> Signature:
        """Read a signature from its canonical text.

        Raises:
            ValueError: If ``key`` is not the canonical text of a signature.
        """
        parts = key.split("/")
        operands = parts[2].split("x") if len(parts) == 5 else []
        if len(operands) != 2:
            raise ValueError(
                f"signature {key!r} is not of the form op/layout/AxB/accumulator/out, "
                "e.g. mm/tn/bf16xbf16/fp32/bf16"
            )
        return cls(
            op=Op(parts[0]),
            layout=Layout(parts[1]),
            a=DType(operands[0]),
            b=DType(operands[1]),
            accumulator=DType(parts[3]),
            out=DType(parts[4]),
        )

    def __lt__(self, other: Signature) -> bool:
        return self.key < other.key


_SIZES = re.compile(r"(?:b([1-9][0-9]*))?m([1-9][0-9]*)n([1-9][0-9]*)k([1-9][0-9]*)")

MAX_EXTENT = 2**31 - 1
"""Largest m, n, k or batch: the kernels take extents as signed 32-bit integers."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One GEMM to serve: out[m, n] = A[m, k] @ B[k, n], ``batch`` times for ``bmm``.

    Raises:
        ValueError: If an extent is outside 1..2**31-1, or ``mm`` has a batch other than 1.
    """

    signature: Signature
    m: int
    n: int
    k: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            extent = getattr(self, name)
            if not 1 <= extent <= MAX_EXTENT:
                raise ValueError(f"{name} must be in 1..{MAX_EXTENT} (got {extent})")
        if self.signature.op is Op.MM and self.batch != 1:
            raise ValueError(f"mm has no batch (got batch {self.batch}); use bmm")

    @property
    def key(self) -> str:
        """Canonical text, e.g. ``mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096``."""
        batch = f"b{self.batch}" if self.signature.op is Op.BMM else ""
        return f"{self.signature.key}/{batch}m{self.m}n{self.n}k{self.k}"

    @classmethod
    def parse(cls, key: str) -> Problem:
        """Read a problem from its canonical text.

        Raises:
            ValueError: If ``key`` is not the canonical text of a problem.
        """
        head, _, sizes = key.rpartition("/")
        signature = Signature.parse(head)
        match = _SIZES.fullmatch(sizes)
        if match is None or (match[1] is not None) != (signature.op is Op.BMM):
            raise ValueError(
                f"sizes {sizes!r} of {key!r} are not of the form m1n2k3 (mm) or b4m1n2k3 (bmm)"
            )
        return cls(
            signature=signature,
            m=int(match[2]),
            n=int(match[3]),
            k=int(match[4]),
            batch=int(match[1] or 1),
        )

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations: a multiply and an add a term."""
        return 2 * self.m * self.n * self.k * self.batch

    def __lt__(self, other: Problem) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, int, int, int, int]:
        return (self.signature.key, self.n, self.k, self.batch, self.m)
