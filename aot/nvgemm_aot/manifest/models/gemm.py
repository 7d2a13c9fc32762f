"""Model GEMMs for any number of tokens, before tensor parallelism divides them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import Layout


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads, which tensor parallelism does not split.

    Attributes:
        key: Config key for their number.
        copied: True if they are replicated when there are more ranks than heads, as servers do with
            key-value heads.
        keys: Key-value heads in the same weight, replicated likewise; 0 without any.
    """

    key: str
    count: int
    copied: bool = False
    keys: int = 0


@dataclass(frozen=True, kw_only=True)
class Split:
    """GEMM extent that ranks divide; by whole heads, if it has heads.

    With ``is_optional``, ranks hold the whole weight if it does not divide evenly.
    """

    extent: Literal["n", "k"]
    heads: Heads | None = None
    is_optional: bool = False


COLUMNS, ROWS = Split(extent="n"), Split(extent="k")


@dataclass(frozen=True, kw_only=True)
class ExpertRouting:
    """Experts on one rank and their token share.

    Attributes:
        experts: Number of experts on the rank.
        experts_per_token: Number of experts per token, over all ranks.
        sharing_ranks: Ranks with the same tokens and different experts; 1 if whole experts are not
            divided among ranks.
        biased: True if each adds biases, in separate operations.
    """

    experts: int
    experts_per_token: int
    sharing_ranks: int = 1
    biased: bool = False

    def rows(self, tokens: int) -> int:
        """Returns the total row count for evenly spread tokens, rounded up to at least one."""
        return -(-self.experts_per_token * tokens // self.sharing_ranks)

    def tokens_of_one(self, tokens: int) -> int:
        """Returns the tokens per expert if they spread evenly, rounded up to at least one."""
        return -(-self.rows(tokens) // self.experts)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rule for a GEMM's activation rows in a forward pass.

    Attributes:
        per_token: Rows per token.
        per_input: Rows per sequence, image or clip, in addition to its tokens' rows.
        fixed: Rows that depend on neither.
    """

    per_token: Fraction = Fraction(1)
    per_input: int = 0
    fixed: int = 0

    def count(self, tokens: int, inputs: int) -> int:
        """Returns the row count for given tokens and inputs, rounded up to at least one."""
        return math.ceil(self.per_token * tokens) + self.per_input * inputs + self.fixed

    @property
    def text(self) -> str:
        """Formula text, e.g. ``729 * inputs``."""
        parts = [
            _scaled_text(self.per_token, "tokens"),
            _scaled_text(self.per_input, "inputs"),
            str(self.fixed or ""),
        ]
        return " + ".join(part for part in parts if part)


def _scaled_text(factor: Fraction | int, unit: str) -> str:
    if not factor:
        return ""
    return unit if factor == 1 else f"{factor} * {unit}"


TOKENS = Rows()
"""Rule with one row per token."""


class Part(enum.Enum):
    """Model parts: those that engines do not quantize by default, and the layers."""

    LAYER = "layer"
    ROUTER = "router"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class ModelGemm:
    """Matrix product: activations [rows, k] by a weight into [rows, n].

    Attributes:
        role: Name in the model, such as ``attention q_proj``.
        n: Out features on one GPU.
        k: In features on one GPU.
        rows: Row count rule; experts' rows follow ``routing``.
        batch: Matrices in the weight that multiply their own rows in one call, as for experts that
            see all tokens; 1 for a plain product.
        part: Model part that it belongs to.
        split: Division by tensor parallelism; None if every rank computes all of it.
        calls: Calls per forward pass.
        routing: Token routing, for one expert's weight; None if every token reaches it.
        layout: ``tn`` for a weight stored as [n, k], as in Linear; ``tt`` for [k, n].
        biased: True if the model adds a bias to the product.
        gated: Following gate with its column order, if kernels apply it.
        gate_before: Gate, as in ``gated``, that makes the input, if kernels fuse its gradient with
            the input's.
        multiplying_gate: Gate, as in ``gated``, that multiplies the result, if kernels apply it.
            Another weight gives the gate's own product.
        is_read_by_gate: True if another weight's ``multiplying_gate`` reads this product.
        has_rows_of_tokens: True if its rows are token rows, in expert order.
        shares_input: True if another expert weight multiplies the same input first, so that their
            input gradients are added.
        is_summed: True if its rows are summed per token.
        unserved: Reason why no kernel computes it as the model does; empty if one can.
    """

    role: str
    n: int
    k: int
    rows: Rows = TOKENS
    batch: int = 1
    part: Part = Part.LAYER
    split: Split | None = None
    calls: int = 1
    routing: ExpertRouting | None = None
    layout: Layout = Layout.TN
    biased: bool = False
    gated: Epilogue | None = None
    gate_before: Epilogue | None = None
    multiplying_gate: Epilogue | None = None
    is_read_by_gate: bool = False
    has_rows_of_tokens: bool = False
    shares_input: bool = False
    is_summed: bool = False
    unserved: str = ""


@dataclass(frozen=True, kw_only=True)
class Fusible:
    """GEMMs with one input that serving engines compute as one, with concatenated weights.

    The ``parts`` differ only in role, n and split. ``gated`` is as in `ModelGemm`, for all parts
    together.
    """

    role: str
    parts: tuple[ModelGemm, ...]
    gated: Epilogue | None = None


Projection = ModelGemm | Fusible


def repeat(times: int, projections: Iterable[Projection]) -> Iterator[Projection]:
    """Multiplies projections' calls, as for a model's layers."""
    if times > 0:
        for projection in projections:
            if isinstance(projection, Fusible):
                parts = tuple(replace(p, calls=p.calls * times) for p in projection.parts)
                yield replace(projection, parts=parts)
            else:
                yield replace(projection, calls=projection.calls * times)
