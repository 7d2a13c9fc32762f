"""Data classes for manifests made from model configs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nvgemm_runtime.gemm.epilogues import GateForm
from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.target import DEFAULT_ARCHITECTURE, Target

from .models.expert_weights import ExpertWeights
from .models.gemm import ExpertRouting, ModelGemm, Rows
from .models.model import Model
from .models.quantization import QuantizedTypes
from .models.tensor_parallel import share
from .models.training import Product, pair_of, sizes_of


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """Options for a manifest from a config; each tuple is nonempty, without duplicates.

    Attributes:
        tokens: Tokens per forward pass, sorted.
        inputs: Sequences, images or clips per forward pass, sorted, for GEMMs whose rows depend on
            them.
        ranks: Tensor-parallel GPU counts.
        expert_ranks: Expert-parallel GPU counts; 1 for none.
        experts: Libraries whose expert weights to declare.
        dtypes: Element types, each 2 bytes.
        targets: Targets to build for.
        separate, fused: Forms in which to declare fusible projections.
        gated: True to declare gate_up projections with their gate, too.
        training: True to declare gradient products, too.
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
        """Unique target architectures."""
        return tuple(dict.fromkeys(target.arch for target in self.targets))


@dataclass(frozen=True, kw_only=True)
class RankGemm:
    """GEMM, or one of its gradient products, on one of ``ranks`` ranks.

    Attributes:
        expert_ranks: Ranks that experts are divided among; 1 for a GEMM without experts.
        product: Forward or gradient product.
        form: Gate form; None without a gate.
        types: Types and scales for a quantized GEMM, or the reason why no kernel computes it; None
            if it is not quantized.
    """

    ranks: int
    gemm: ModelGemm
    types: QuantizedTypes | str | None
    expert_ranks: int = 1
    product: Product = Product.FORWARD
    form: GateForm | None = None

    @property
    def pair(self) -> tuple[int, int]:
        """Extents that do not depend on tokens, ordered as in `pair_of`."""
        return pair_of(self.gemm, self.product)


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """Products with the same kind, signature and token counts.

    Attributes:
        product: Their kind.
        routing: Token routing to experts; None for a GEMM without experts.
        rule: Row count as a function of tokens and inputs, without routing.
        batch: Matrices in a batched product; 1 for a plain one.
        signature: Their signature, in the first requested dtype.
        rows: Sorted unique row counts: for one expert, or for all experts in a grouped GEMM. They
            are m, or k for a product that sums over tokens.
        uses: The model's products by fixed extents (`RankGemm.pair`).
    """

    product: Product
    routing: ExpertRouting | None
    rule: Rows
    batch: int
    signature: Signature
    rows: tuple[int, ...]
    uses: dict[tuple[int, int], list[RankGemm]]

    @property
    def groups(self) -> int | None:
        """Number of experts in one grouped GEMM; None if not grouped."""
        if self.routing is None or not self.signature.op.has_groups:
            return None
        return self.routing.experts

    @property
    def experts_at_once(self) -> int:
        """Number of experts in one call; 1 for a single expert or none."""
        if self.routing is not None and self.product.is_gathered:
            return self.routing.experts
        return self.groups or 1

    @property
    def expert_ranks(self) -> int:
        """Ranks that whole experts are divided among, shared by all uses."""
        (use, *_), *_ = self.uses.values()
        return use.expert_ranks

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Each problem's m, n and k."""
        return [sizes_of(self.product, rows, pair) for rows in self.rows for pair in self.uses]


@dataclass(frozen=True, kw_only=True)
class ConfigManifest:
    """Manifest made from a config.

    ``left_out`` holds undeclarable GEMMs, each with its reason.
    """

    name: str
    model: Model
    options: ManifestOptions
    entries: tuple[ConfigEntry, ...]
    left_out: tuple[tuple[RankGemm, str], ...]

    @property
    def problems(self) -> int:
        """Number of declared problems."""
        declared = {
            (entry.signature, entry.groups, entry.batch, sizes)
            for entry in self.entries
            for sizes in entry.sizes
        }
        return len(declared) * len(self.options.dtypes)

    @property
    def forward_calls(self) -> int:
        """Number of GEMMs in a forward pass, counted per expert."""
        return sum(gemm.calls for gemm in share(self.model.projections, 1, fused=False))

    @property
    def left_out_calls(self) -> Counter[str]:
        """Number of undeclared forward GEMMs by reason, on the fewest ranks."""
        reasons = {
            use.gemm.role: reason
            for use, reason in self.left_out
            if use.product is Product.FORWARD
            and use.form is None
            and use.ranks == self.options.ranks[0]
        }
        calls: Counter[str] = Counter()
        for projection in self.model.projections:
            fused = reasons.get(projection.role)
            for gemm in share([projection], 1, fused=False):
                if (reason := reasons.get(gemm.role, fused)) is not None:
                    calls[reason] += gemm.calls
        return calls
