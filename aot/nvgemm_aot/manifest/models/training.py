"""Training step products: forward products and their gradients."""

from __future__ import annotations

import enum

from nvgemm_runtime.gemm.moe_operators import BIAS_COLUMNS, GATHERED_MAX_N
from nvgemm_runtime.gemm.problem import Layout, Op

from .gemm import ModelGemm


class Product(str, enum.Enum):
    """Product kind: the layer itself, or a gradient in the backward pass.

    For experts with biases, torch computes ``FORWARD`` and then adds them; `nvgemm_runtime.moe`
    computes ``BIASED_FORWARD`` in one kernel. If two weights multiply one input,
    `nvgemm_runtime.moe` computes the second's ``ADDED_INPUT_GRADIENT``, whose kernel adds the
    first's gradient. ``ROW_SUM`` adds each token's rows with their routing weights: its experts'
    results, or their input gradients. ``WEIGHTED_ROW`` applies routing weights to rows in the
    backward pass. ``GATHERED_FORWARD`` gathers token rows for an up projection with a gate
    (`gathers_rows`).

    Each kind has one extent that grows with the tokens, and two fixed ones (`pair_of`).
    """

    FORWARD = "forward"
    BIASED_FORWARD = "forward, with biases"
    GATHERED_FORWARD = "forward, gathered rows"
    INPUT_GRADIENT = "input gradient"
    ADDED_INPUT_GRADIENT = "input gradient, added to another"
    WEIGHT_GRADIENT = "weight gradient"
    BIAS_GRADIENT = "bias gradient"
    ROW_SUM = "sum of each token's rows"
    WEIGHTED_ROW = "rows times routing weights"

    @property
    def sums_over_tokens(self) -> bool:
        """True if k, not m, grows with the tokens."""
        return self in (Product.WEIGHT_GRADIENT, Product.BIAS_GRADIENT)

    @property
    def is_gathered(self) -> bool:
        """True if indices select the rows that weights multiply."""
        return self in (Product.ROW_SUM, Product.WEIGHTED_ROW)

    @property
    def is_of_input(self) -> bool:
        """True for an input gradient, alone or added to another."""
        return self in (Product.INPUT_GRADIENT, Product.ADDED_INPUT_GRADIENT)


def gathers_rows(gemm: ModelGemm) -> bool:
    """Returns True if the kernel may gather the product's rows.

    False if experts are divided among ranks, which exchange rows in between.
    """
    if not gemm.has_rows_of_tokens or gemm.routing is None or gemm.routing.sharing_ranks > 1:
        return False
    is_half = gemm.is_read_by_gate or gemm.multiplying_gate is not None
    return gemm.n * (2 if is_half else 1) <= GATHERED_MAX_N


def products_of(gemm: ModelGemm) -> tuple[Product, ...]:
    """Returns a forward GEMM's training step products.

    A Linear's bias gradient is summed without a product; expert bias gradients are products with
    columns of ones. ``ROW_SUM`` and ``WEIGHTED_ROW`` are only for experts that are not divided
    among ranks, which exchange results in between.
    """
    biased = gemm.routing is not None and gemm.routing.biased
    left_out = set() if biased else {Product.BIASED_FORWARD, Product.BIAS_GRADIENT}
    left_out.add(Product.GATHERED_FORWARD)
    if not gemm.shares_input:
        left_out.add(Product.ADDED_INPUT_GRADIENT)
    if gemm.routing is None or gemm.routing.sharing_ranks > 1:
        left_out |= {Product.ROW_SUM, Product.WEIGHTED_ROW}
    if not gemm.is_summed:
        left_out.add(Product.ROW_SUM)
    return tuple(product for product in Product if product not in left_out)


def pair_of(gemm: ModelGemm, product: Product) -> tuple[int, int]:
    """Returns the fixed extents: [n, k], or [m, n] for a product that sums over tokens.

    A weight gradient has the weight's memory layout. Routing weights apply to the rows that enter
    the weight gradient; for the down projection, to the narrower of its gradient's two factors.
    """
    out_features, in_features = gemm.n, gemm.k
    if product is Product.ROW_SUM:
        assert gemm.routing is not None
        return out_features, gemm.routing.experts_per_token
    if product is Product.WEIGHTED_ROW:
        return (min(out_features, in_features) if gemm.is_summed else in_features), 1
    if product is Product.BIAS_GRADIENT:
        return out_features, BIAS_COLUMNS
    is_turned = product.is_of_input or (
        product is Product.WEIGHT_GRADIENT and gemm.layout.b_row_major
    )
    return (in_features, out_features) if is_turned else (out_features, in_features)


def sizes_of(product: Product, tokens: int, pair: tuple[int, int]) -> tuple[int, int, int]:
    """Returns a product's m, n and k."""
    return (*pair, tokens) if product.sums_over_tokens else (tokens, *pair)


def layout_of(gemm: ModelGemm, product: Product) -> Layout:
    """Returns a product's layout: an input gradient multiplies by the transposed weight."""
    if product.is_gathered:
        return Layout.TT
    if product in (Product.FORWARD, Product.BIASED_FORWARD, Product.GATHERED_FORWARD):
        return gemm.layout
    if product.is_of_input:
        return Layout.TN if gemm.layout.b_row_major else Layout.TT
    return Layout.NT


def op_of(gemm: ModelGemm, product: Product) -> Op:
    """Returns the operation for all experts or matrices at once, or for a single one."""
    if product.is_gathered:
        return Op.GATHERED_MM
    if gemm.routing is None:
        return Op.BMM if gemm.batch > 1 else Op.MM
    if product is Product.GATHERED_FORWARD:
        return Op.GATHERED_GROUPED_MM
    return Op.K_GROUPED_MM if product.sums_over_tokens else Op.GROUPED_MM
