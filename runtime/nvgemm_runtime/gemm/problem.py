"""Problems and signatures: a GEMM with and without its sizes.

A kernel is specialised on a signature; a problem adds sizes. Both are frozen, hashable, ordered by
their text key, and their keys parse back to equal values.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass

from .epilogues import ALL_EPILOGUES, Epilogue, GateForm
from .types import DType, ScaleRecipe

__all__ = ["MAX_EXTENT", "DType", "Layout", "Op", "Problem", "Signature"]


class Op(str, enum.Enum):
    """Operation, by torch name.

    - ``mm`` multiplies matrices, ``bmm`` a batch.
    - ``grouped_mm`` multiplies A's rows, group by group, with one B per group: MoE experts.
    - ``k_grouped_mm`` has groups along k and one result per group: the experts' weight gradients.
    - ``gathered_mm`` multiplies each short row in A with rows from B selected by indices: weighted
      sums over expert results.
    - ``gathered_grouped_mm`` is ``grouped_mm`` on A's rows selected by indices: each expert reads
      its tokens in place.
    """

    MM = "mm"
    BMM = "bmm"
    GROUPED_MM = "grouped_mm"
    K_GROUPED_MM = "k_grouped_mm"
    GATHERED_MM = "gathered_mm"
    GATHERED_GROUPED_MM = "gathered_grouped_mm"

    @property
    def has_groups(self) -> bool:
        """True if offsets end groups along m or k."""
        return self.groups_rows or self is Op.K_GROUPED_MM

    @property
    def groups_rows(self) -> bool:
        """True if groups are rows along m, with one B per group."""
        return self in (Op.GROUPED_MM, Op.GATHERED_GROUPED_MM)

    @property
    def is_gathered(self) -> bool:
        """True if indices select rows: in B per element of A, or in A per result row."""
        return self in (Op.GATHERED_MM, Op.GATHERED_GROUPED_MM)

    @property
    def is_moe(self) -> bool:
        """True for the operations that `nvgemm_runtime.moe` uses."""
        return self.has_groups or self is Op.GATHERED_MM


class Layout(str, enum.Enum):
    """Majors of A and B in BLAS letters; the output is always row-major.

    ``t`` is row-major (contiguous last dimension), ``n`` is column-major. A is m x k and B is k x
    n, so ``tn`` means that k is contiguous in both, as in ``torch.nn.Linear``.
    """

    TN = "tn"
    TT = "tt"
    NN = "nn"
    NT = "nt"

    @property
    def a_row_major(self) -> bool:
        """True if A (m x k) is contiguous along k."""
        return self.value[0] == "t"

    @property
    def b_row_major(self) -> bool:
        """True if B (k x n) is contiguous along n."""
        return self.value[1] == "t"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Key that a kernel is specialised on; it serves all aligned problems with this signature.

    Attributes:
        op: Operation; it fixes operand ranks. mm and gathered_mm: all 2. bmm: all 3. grouped_mm and
            gathered_grouped_mm: B 3, A and result 2. k_grouped_mm: result 3, A and B 2.
        layout: Majors of A and B.
        a, b: Dtypes of A and B: equal, two fp8 dtypes, or fp32 and B's for gathered_mm.
        accumulator: Dtype in which products are summed.
        out: Result dtype.
        scales: Scale recipe for A and B, if any.
        epilogue: Epilogue, if any.
    """

    op: Op
    layout: Layout
    a: DType
    b: DType
    accumulator: DType
    out: DType
    scales: ScaleRecipe | None = None
    epilogue: Epilogue | None = None

    @property
    def dtype(self) -> DType:
        """Dtype that manifests name: A's, or B's for ``gathered_mm``, whose A is fp32."""
        return self.b if self.op is Op.GATHERED_MM else self.a

    @property
    def is_gated(self) -> bool:
        """True if the epilogue has a gate, in any form."""
        return self.epilogue is not None and self.epilogue.gate is not None

    @property
    def form(self) -> GateForm | None:
        """Gated epilogue form; None without a gate."""
        return None if self.epilogue is None else self.epilogue.form

    @property
    def is_gradient(self) -> bool:
        """True if the epilogue is a gate's gradient, with or without sums."""
        return self.form is not None and self.form.is_gradient

    def out_columns(self, n: int) -> int:
        """Returns the result's column count for a product with n columns."""
        form = self.form
        return n if form is None else n * form.row.out_columns // form.row.product_columns

    def part_columns(self, n: int) -> int:
        """Returns the column count for each result part; kernels store parts separately."""
        form = self.form
        return self.out_columns(n) // (1 if form is None else form.row.parts)

    @property
    def key(self) -> str:
        """Canonical text: ``mm/tn/bf16xbf16/fp32/bf16``, then scales and epilogue if present.

        For example ``mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16``.
        """
        parts = [
            self.op.value,
            self.layout.value,
            f"{self.a.value}x{self.b.value}",
            self.accumulator.value,
            self.out.value,
        ]
        if self.scales is not None:
            parts.append(self.scales.value)
        if self.epilogue is not None:
            parts.append(self.epilogue.name)
        return "/".join(parts)

    @classmethod
    @functools.lru_cache(maxsize=1024)  # bundles repeat few signatures thousands of times
    def parse(cls, key: str) -> Signature:
        """Parses a signature's canonical text.

        Raises:
            ValueError: If ``key`` is not a signature's canonical text.
        """
        parts = key.split("/")
        operands = parts[2].split("x") if 5 <= len(parts) <= 7 else []
        if len(operands) != 2:
            raise ValueError(
                f"signature {key!r} is not of the form op/layout/AxB/accumulator/out"
                "[/scales][/epilogue], e.g. mm/tn/bf16xbf16/fp32/bf16"
            )
        scales, epilogue = _parse_optional(key, parts[5:])
        return cls(
            op=Op(parts[0]),
            layout=Layout(parts[1]),
            a=DType(operands[0]),
            b=DType(operands[1]),
            accumulator=DType(parts[3]),
            out=DType(parts[4]),
            scales=scales,
            epilogue=epilogue,
        )

    def __lt__(self, other: Signature) -> bool:
        return self.key < other.key


def _parse_optional(key: str, parts: list[str]) -> tuple[ScaleRecipe | None, Epilogue | None]:
    """Parses the optional scales, then the optional epilogue."""
    rest = list(parts)
    scales = ScaleRecipe(rest.pop(0)) if rest and rest[0] in _SCALES else None
    epilogue = Epilogue.parse(rest.pop(0)) if rest and rest[0] in _EPILOGUES else None
    if rest:
        raise ValueError(
            f"{rest[0]!r} of signature {key!r} is misplaced: scales (one of "
            f"{', '.join(sorted(_SCALES))}) come before an epilogue (one of "
            f"{', '.join(sorted(_EPILOGUES))})"
        )
    return scales, epilogue


_SCALES = frozenset(recipe.value for recipe in ScaleRecipe)
_EPILOGUES = frozenset(epilogue.name for epilogue in ALL_EPILOGUES)

_COUNTS = {op: "b" if op is Op.BMM else "g" if op.has_groups else "" for op in Op}
"""Prefix letter for the batch or group count in a problem key."""

_SIZES = re.compile(r"(?:([bg])([1-9][0-9]*))?m([1-9][0-9]*)n([1-9][0-9]*)k([1-9][0-9]*)")

MAX_EXTENT = 2**31 - 1
"""Largest m, n, k or batch: kernels take extents as signed 32-bit integers."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """GEMM to serve: out[m, n] = A[m, k] @ B[k, n], ``batch`` times for ``bmm``.

    - ``grouped_mm``: m counts rows over all groups; B has ``groups`` matrices.
    - ``k_grouped_mm``: k counts terms over all groups; the result has ``groups`` matrices.
    - ``gathered_mm``: k counts the rows in B added to one result row. B's row count affects nothing
      and is not part of the problem.
    - ``gathered_grouped_mm``: m counts result rows. A's row count is not part of the problem.

    Extents count values: with fp4, k is twice the tensor extent. With a gated epilogue, n counts
    B's columns, and `out_n` the result's.

    Raises:
        ValueError: If an extent is outside 1..2**31-1, the operation has no batch or groups, k does
            not fill whole elements, or n does not form gate pairs.
    """

    signature: Signature
    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch", "groups"):
            extent = getattr(self, name)
            if not 1 <= extent <= MAX_EXTENT:
                raise ValueError(f"{name} must be in 1..{MAX_EXTENT} (got {extent})")
        op = self.signature.op
        if op is not Op.BMM and self.batch != 1:
            raise ValueError(f"{op.value} has no batch (got batch {self.batch}); use bmm")
        if not op.has_groups and self.groups != 1:
            raise ValueError(f"{op.value} has no groups (got {self.groups}); use grouped_mm")
        for dtype in (self.signature.a, self.signature.b):
            if self.k % dtype.packed:
                raise ValueError(
                    f"k must be a multiple of {dtype.packed} for {dtype.value}, which packs "
                    f"{dtype.packed} values per element (got {self.k})"
                )
        form = self.signature.form
        if form is not None and self.n % form.row.product_columns:
            assert self.signature.epilogue is not None
            raise ValueError(
                f"n must be even for {self.signature.epilogue.name}, which combines column "
                f"pairs (got {self.n})"
            )

    @property
    def out_n(self) -> int:
        """Result columns: n, or the gated epilogue form's count."""
        return self.signature.out_columns(self.n)

    @property
    def key(self) -> str:
        """Canonical text, e.g. ``mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096``."""
        letter = _COUNTS[self.signature.op]
        count = f"{letter}{self.batch * self.groups}" if letter else ""
        return f"{self.signature.key}/{count}m{self.m}n{self.n}k{self.k}"

    @classmethod
    def parse(cls, key: str) -> Problem:
        """Parses a problem's canonical text.

        Raises:
            ValueError: If ``key`` is not a problem's canonical text.
        """
        head, _, sizes = key.rpartition("/")
        signature = Signature.parse(head)
        match = _SIZES.fullmatch(sizes)
        if match is None or (match[1] or "") != _COUNTS[signature.op]:
            raise ValueError(
                f"sizes {sizes!r} of {key!r} are not of the form m1n2k3 (mm, gathered_mm), "
                "b4m1n2k3 (bmm) or g4m1n2k3 (grouped_mm, k_grouped_mm, gathered_grouped_mm)"
            )
        count = int(match[2] or 1)
        return cls(
            signature=signature,
            m=int(match[3]),
            n=int(match[4]),
            k=int(match[5]),
            batch=count if signature.op is Op.BMM else 1,
            groups=count if signature.op.has_groups else 1,
        )

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations: a multiply and an add per term."""
        return 2 * self.m * self.n * self.k * self.batch

    def __lt__(self, other: Problem) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, int, int, int, int]:
        return (self.signature.key, self.n, self.k, self.batch * self.groups, self.m)
