"""The GEMMs of a model for any number of tokens, before tensor parallelism divides them."""

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
    """Attention heads, which tensor parallelism keeps whole.

    Attributes:
        key: The config's key that holds their number.
        copied: Whether more ranks than heads hold copies, as servers do with key-value heads.
        keys: Key-value heads whose keys and values are in the same weight, likewise copied; 0 if
            none are.
    """

    key: str
    count: int
    copied: bool = False
    keys: int = 0


@dataclass(frozen=True, kw_only=True)
class Split:
    """The extent of a GEMM that ranks divide; by whole heads, where it has heads.

    If ``is_optional``, each rank has all of a weight that they cannot divide evenly.
    """

    extent: Literal["n", "k"]
    heads: Heads | None = None
    is_optional: bool = False


COLUMNS, ROWS = Split(extent="n"), Split(extent="k")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts that one rank computes, and how many tokens reach them.

    Attributes:
        experts: How many they are.
        chosen: To how many experts, of all ranks, a token is sent.
        sharing: Ranks that hold the same tokens and different experts; 1 where experts are not
            divided among ranks as wholes.
        biased: Whether each adds biases, by operations of their own.
    """

    experts: int
    chosen: int
    sharing: int = 1
    biased: bool = False

    def rows(self, tokens: int) -> int:
        """Rows that all of them see when tokens spread evenly: rounded up, so at least one."""
        return -(-self.chosen * tokens // self.sharing)

    def tokens_of_one(self, tokens: int) -> int:
        """Tokens that each of them sees when they spread evenly: rounded up, so at least one."""
        return -(-self.rows(tokens) // self.experts)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How many rows of activations a GEMM sees in a forward pass.

    Attributes:
        per_token: Rows of a token.
        per_input: Rows of a sequence, an image or a clip, beside those of its tokens.
        fixed: Rows that depend on neither.
    """

    per_token: Fraction = Fraction(1)
    per_input: int = 0
    fixed: int = 0

    def count(self, tokens: int, inputs: int) -> int:
        """The rows of so many tokens and inputs: rounded up, so at least one."""
        return math.ceil(self.per_token * tokens) + self.per_input * inputs + self.fixed

    @property
    def text(self) -> str:
        """The rule as a formula, e.g. ``729 * inputs``."""
        parts = [
            _times(self.per_token, "tokens"),
            _times(self.per_input, "inputs"),
            str(self.fixed or ""),
        ]
        return " + ".join(part for part in parts if part)


def _times(factor: Fraction | int, what: str) -> str:
    if not factor:
        return ""
    return what if factor == 1 else f"{factor} * {what}"


TOKENS = Rows()
"""One row for each token."""


class Part(enum.Enum):
    """Parts of a model that engines never quantize by default, and the others."""

    LAYER = "layer"
    ROUTER = "router"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class ModelGemm:
    """One matrix product: activations [rows, k] by a weight into [rows, n].

    Attributes:
        role: Its name in the model, such as ``attention q_proj``.
        n: Out features, on one GPU.
        k: In features, on one GPU.
        rows: How many rows there are; those of experts are by ``routing``.
        batch: Matrices of a weight that each multiply rows of their own in one call, as experts
            that see all tokens do; 1 for a plain product.
        part: Part of the model that it belongs to.
        split: How tensor parallelism divides it; None where every rank computes all of it.
        calls: How often one forward pass computes it.
        routing: For one expert's weight: how tokens reach it. None where every token does.
        layout: ``tn`` for a weight kept as [n, k], as Linear does, and ``tt`` for [k, n].
        biased: Whether the model adds a bias to the product.
        gated: The gate that follows, and the order of its columns, where kernels apply such a gate.
        gate_before: The gate, as ``gated``, that makes its input, where kernels compute the
            gradient of such a gate behind that of the input.
        gate_beside: The gate, as ``gated``, that multiplies its result, where kernels apply such a
            gate, whose own product another weight gives.
        is_read_by_gate: Whether the gate beside another weight reads its product.
        has_rows_of_tokens: Whether its rows are those of tokens, in the order of experts.
        shares_input: Whether another expert weight multiplies its input before it, so that the
            gradient by this one is added to that by the other.
        is_summed: Whether its rows belong to tokens, each of which gets the sum of its own.
        unserved: Why no kernel computes it as the model does, in words; empty where one can.
    """

    role: str
    n: int
    k: int
    rows: Rows = TOKENS
    batch: int = 1
    part: Part = Part.LAYER
    split: Split | None = None
    calls: int = 1
    routing: Routing | None = None
    layout: Layout = Layout.TN
    biased: bool = False
    gated: Epilogue | None = None
    gate_before: Epilogue | None = None
    gate_beside: Epilogue | None = None
    is_read_by_gate: bool = False
    has_rows_of_tokens: bool = False
    shares_input: bool = False
    is_summed: bool = False
    unserved: str = ""


@dataclass(frozen=True, kw_only=True)
class Fusible:
    """GEMMs of one input that serving engines compute as one, their weights side by side.

    The separate ``parts`` differ only in role, n and split. ``gated`` is as in `ModelGemm`, of the
    parts together.
    """

    role: str
    parts: tuple[ModelGemm, ...]
    gated: Epilogue | None = None


Projection = ModelGemm | Fusible


def repeat(times: int, projections: Iterable[Projection]) -> Iterator[Projection]:
    """Projections that a model has ``times`` times, such as those of its layers."""
    if times > 0:
        for projection in projections:
            if isinstance(projection, Fusible):
                parts = tuple(replace(p, calls=p.calls * times) for p in projection.parts)
                yield replace(projection, parts=parts)
            else:
                yield replace(projection, calls=projection.calls * times)
