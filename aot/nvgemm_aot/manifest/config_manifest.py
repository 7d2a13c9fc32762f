"""What a manifest made from a model's config holds, and what it is made for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nvgemm_runtime.gemm.epilogues import GateForm
from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.target import DEFAULT_ARCHITECTURE, Target

from .models.expert_weights import ExpertWeights
from .models.gemm import ModelGemm, Routing, Rows
from .models.model import Model
from .models.quantization import QuantizedTypes
from .models.tensor_parallel import share
from .models.training import Product, pair_of, sizes_of


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """Options of a manifest from a config; each tuple is not empty and has no duplicates.

    Attributes:
        tokens: Tokens of a forward pass, sorted.
        inputs: Sequences, images or clips of a forward pass, sorted: for GEMMs whose rows they set.
        ranks: Numbers of GPUs that tensor parallelism divides the model over.
        expert_ranks: Numbers of GPUs that experts are divided among as wholes; 1 for none.
        experts: Libraries whose weights of experts to declare.
        dtypes: Element types, of 2 bytes each.
        targets: What to build for.
        separate, fused: In which forms to declare projections that can be fused.
        gated: Whether to declare gate_up projections with their gate, too.
        training: Whether to declare the products of gradients, too.
    """

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    inputs: tuple[int, ...] = (1,)
    expert_ranks: tuple[int, ...] = (1,)
    experts: tuple[ExpertWeights, ...] = (ExpertWeights.TRANSFORMERS,)
    dtypes: tuple[DType, ...] = (DType.BF16,)
    targets: tuple[Target, ...] = (Target(arch=DEFAULT_ARCHITECTURE),)
    separate: bool = True
    fused: bool = False
    gated: bool = False
    training: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those of the targets, each once."""
        return tuple(dict.fromkeys(target.arch for target in self.targets))


@dataclass(frozen=True, kw_only=True)
class RankGemm:
    """A GEMM, or the product of one of its gradients, as one of ``ranks`` ranks computes it.

    Attributes:
        expert_ranks: Ranks that experts are divided among; 1 for a GEMM of no experts.
        product: Which of its products.
        form: In which form a gate is part of it; None if none is.
        types: Types and scales of a quantized GEMM, or why no kernel computes it; None if it is
            not quantized.
    """

    ranks: int
    gemm: ModelGemm
    types: QuantizedTypes | str | None
    expert_ranks: int = 1
    product: Product = Product.FORWARD
    form: GateForm | None = None

    @property
    def pair(self) -> tuple[int, int]:
        """Its extents that do not depend on tokens, as `pair_of` orders them."""
        return pair_of(self.gemm, self.product)


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """Products of one kind and signature that see the same numbers of tokens.

    Attributes:
        product: Their kind.
        routing: How tokens reach the experts; None for a GEMM of no experts.
        rule: How its rows depend on tokens and inputs, where it has no routing.
        batch: Matrices of a batched product; 1 for a plain one.
        signature: Their signature, in the first of the wanted types.
        rows: Numbers of tokens, sorted without duplicates: of one expert, or of all experts of a
            grouped GEMM. They are the m, or the k of a product that sums over tokens.
        uses: By the fixed extents (`RankGemm.pair`): where the model has such a product.
    """

    product: Product
    routing: Routing | None
    rule: Rows
    batch: int
    signature: Signature
    rows: tuple[int, ...]
    uses: dict[tuple[int, int], list[RankGemm]]

    @property
    def groups(self) -> int | None:
        """How many experts one GEMM computes; None where they are not grouped."""
        if self.routing is None or not self.signature.op.has_groups:
            return None
        return self.routing.experts

    @property
    def experts_at_once(self) -> int:
        """How many experts one call computes; 1 where it is of one, or of none."""
        if self.routing is not None and self.product.is_gathered:
            return self.routing.experts
        return self.groups or 1

    @property
    def expert_ranks(self) -> int:
        """Ranks among which experts are divided as wholes: the same for all of the entry."""
        (use, *_), *_ = self.uses.values()
        return use.expert_ranks

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """The m, n and k of every problem."""
        return [sizes_of(self.product, rows, pair) for rows in self.rows for pair in self.uses]


@dataclass(frozen=True, kw_only=True)
class ConfigManifest:
    """A manifest made from a config.

    ``left_out`` are the GEMMs that it cannot declare, each with the reason.
    """

    name: str
    model: Model
    wanted: ManifestOptions
    entries: tuple[ConfigEntry, ...]
    left_out: tuple[tuple[RankGemm, str], ...]

    @property
    def problems(self) -> int:
        """Number of problems that it declares."""
        declared = {
            (entry.signature, entry.groups, entry.batch, sizes)
            for entry in self.entries
            for sizes in entry.sizes
        }
        return len(declared) * len(self.wanted.dtypes)

    @property
    def forward_calls(self) -> int:
        """GEMMs of a forward pass of the model, those of each expert counted."""
        return sum(gemm.calls for gemm in share(self.model.projections, 1, fused=False))

    @property
    def left_out_calls(self) -> Counter[str]:
        """By reason: how many of these it does not declare, on the fewest ranks."""
        reasons = {
            use.gemm.role: reason
            for use, reason in self.left_out
            if use.product is Product.FORWARD
            and use.form is None
            and use.ranks == self.wanted.ranks[0]
        }
        calls: Counter[str] = Counter()
        for projection in self.model.projections:
            fused = reasons.get(projection.role)
            for gemm in share([projection], 1, fused=False):
                if (reason := reasons.get(gemm.role, fused)) is not None:
                    calls[reason] += gemm.calls
        return calls
