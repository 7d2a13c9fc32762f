"""The products of a training step: for each product of the forward pass, those of its gradients."""

from __future__ import annotations

import enum

from nvgemm_runtime.gemm.moe_operators import BIAS_COLUMNS, GATHERED_MAX_N
from nvgemm_runtime.gemm.problem import Layout, Op

from .gemm import ModelGemm


class Product(str, enum.Enum):
    """What a product computes: the layer itself, or a gradient of the backward pass.

    Of experts with biases, torch computes ``FORWARD`` and adds the biases to it;
    `nvgemm_runtime.moe` computes ``BIASED_FORWARD``, where a kernel does both. Where two weights
    multiply one input, `nvgemm_runtime.moe` computes ``ADDED_INPUT_GRADIENT`` of the second, which
    adds to the gradient by the first, where a kernel does both. ``ROW_SUM`` adds the rows of each
    token, each times its weight: the results of its experts, or their gradients of its input; and
    ``WEIGHTED_ROW`` gives rows their weights, in the backward. ``GATHERED_FORWARD`` takes the rows
    of an up projection where the tokens are; it is one of those with a gate (`gathers_rows`).

    Each has one extent that grows with the tokens, and a pair of fixed ones (`pair_of`).
    """

    FORWARD = "forward"
    BIASED_FORWARD = "forward, with biases"
    GATHERED_FORWARD = "forward, of rows that are gathered"
    INPUT_GRADIENT = "gradient of input"
    ADDED_INPUT_GRADIENT = "gradient of input, added to another"
    WEIGHT_GRADIENT = "gradient of weight"
    BIAS_GRADIENT = "gradient of bias"
    ROW_SUM = "sum of each token's rows"
    WEIGHTED_ROW = "rows times their weights"

    @property
    def sums_over_tokens(self) -> bool:
        """Whether k grows with the tokens, and not m."""
        return self in (Product.WEIGHT_GRADIENT, Product.BIAS_GRADIENT)

    @property
    def is_gathered(self) -> bool:
        """Whether it multiplies weights with rows that indices name."""
        return self in (Product.ROW_SUM, Product.WEIGHTED_ROW)

    @property
    def is_of_input(self) -> bool:
        """Whether it is the gradient of the input, by itself or added to another."""
        return self in (Product.INPUT_GRADIENT, Product.ADDED_INPUT_GRADIENT)


def gathers_rows(gemm: ModelGemm) -> bool:
    """Whether its product is declared with rows that the kernel gathers, too.

    Not where experts are divided among ranks, for then rows are exchanged in between.
    """
    if not gemm.has_rows_of_tokens or gemm.routing is None or gemm.routing.sharing > 1:
        return False
    is_half = gemm.is_read_by_gate or gemm.gate_beside is not None
    return gemm.n * (2 if is_half else 1) <= GATHERED_MAX_N


def products_of(gemm: ModelGemm) -> tuple[Product, ...]:
    """The products of a training step that belong to a GEMM of the forward pass.

    The gradient of a Linear's bias is summed without a product, those of experts' biases by one
    with columns of ones. Rows are summed, or get their weights, where experts are not divided among
    ranks, whose results are exchanged in between.
    """
    biased = gemm.routing is not None and gemm.routing.biased
    left_out = set() if biased else {Product.BIASED_FORWARD, Product.BIAS_GRADIENT}
    left_out.add(Product.GATHERED_FORWARD)
    if not gemm.shares_input:
        left_out.add(Product.ADDED_INPUT_GRADIENT)
    if gemm.routing is None or gemm.routing.sharing > 1:
        left_out |= {Product.ROW_SUM, Product.WEIGHTED_ROW}
    if not gemm.is_summed:
        left_out.add(Product.ROW_SUM)
    return tuple(one for one in Product if one not in left_out)


def pair_of(gemm: ModelGemm, product: Product) -> tuple[int, int]:
    """The fixed extents: [n, k], or [m, n] of a product that sums over tokens.

    The gradient of a weight is computed as the weight lies in memory. For it, rows get their
    routing weights: those that go into it, but of the down projection the narrower of what its
    gradient multiplies.
    """
    out_features, in_features = gemm.n, gemm.k
    if product is Product.ROW_SUM:
        assert gemm.routing is not None
        return out_features, gemm.routing.chosen
    if product is Product.WEIGHTED_ROW:
        return (min(out_features, in_features) if gemm.is_summed else in_features), 1
    if product is Product.BIAS_GRADIENT:
        return out_features, BIAS_COLUMNS
    is_turned = product.is_of_input or (
        product is Product.WEIGHT_GRADIENT and gemm.layout.b_row_major
    )
    return (in_features, out_features) if is_turned else (out_features, in_features)


def sizes_of(product: Product, tokens: int, pair: tuple[int, int]) -> tuple[int, int, int]:
    """The m, n and k of a product."""
    return (*pair, tokens) if product.sums_over_tokens else (tokens, *pair)


def layout_of(gemm: ModelGemm, product: Product) -> Layout:
    """The layout of a product: the gradient of the input multiplies by the transposed weight."""
    if product.is_gathered:
        return Layout.TT
    if product in (Product.FORWARD, Product.BIASED_FORWARD, Product.GATHERED_FORWARD):
        return gemm.layout
    if product.is_of_input:
        return Layout.TN if gemm.layout.b_row_major else Layout.TT
    return Layout.NT


def op_of(gemm: ModelGemm, product: Product) -> Op:
    """The operation that computes all experts or matrices at once, or one where there is one."""
    if product.is_gathered:
        return Op.GATHERED_MM
    if gemm.routing is None:
        return Op.BMM if gemm.batch > 1 else Op.MM
    if product is Product.GATHERED_FORWARD:
        return Op.GATHERED_GROUPED_MM
    return Op.K_GROUPED_MM if product.sums_over_tokens else Op.GROUPED_MM
