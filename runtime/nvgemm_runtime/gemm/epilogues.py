"""Activations, gates and epilogues: all that is known of each, in one row.

These are the tables to extend for another one, as `types` holds those of element types.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .types import DType, RowEnum


@dataclass(frozen=True, kw_only=True)
class ActivationRow:
    """What is known of an activation.

    Attributes:
        torch_name: Its function in ``torch.nn.functional``.
        torch_options: What that is called with besides its input.
        commutes_with_rounding: Whether rounding before it or behind it gives the same.
        efc_source: What makes ``D`` of ``x``, in the language of `cutlass.operators`' epilogues.
    """

    torch_name: str
    torch_options: Mapping[str, str] = field(default_factory=dict)
    commutes_with_rounding: bool = False
    efc_source: tuple[str, ...]


class Activation(RowEnum):
    """What an epilogue applies after its sum; `row` has all that is known of it."""

    row: ActivationRow

    RELU = "relu", ActivationRow(
        torch_name="relu", commutes_with_rounding=True, efc_source=("D = relu(x)",)
    )  # fmt: skip
    # The constants are sqrt(2 / pi) and that of its publication (Hendrycks and Gimpel, 2016). gelu
    # and silu of the operators' own vocabulary raise KeyError (cutlass.operators 0.3.0).
    GELU_TANH = "gelu_tanh", ActivationRow(
        torch_name="gelu", torch_options={"approximate": "tanh"}, efc_source=(
            "t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))",
            "D = 0.5 * x * (1.0 + t)",
        ),
    )  # fmt: skip
    SILU = "silu", ActivationRow(torch_name="silu", efc_source=("D = x * sigmoid(x)",))


class Addend(enum.Enum):
    """What an epilogue adds."""

    ROW = "row"
    """A vector of n values, added to each row."""
    MATRIX = "matrix"
    """A matrix (or a batch of them) of the result's shape."""
    PRODUCT = "product"
    """Not added, but read in its place: the product of gates and ups that was kept, [m, 2 n]."""
    GATES = "gates"
    """Not added, but read in its place: the product of gates, [m, n]."""


class WeightOrder(enum.Enum):
    """Which columns of B give the gates of a gated epilogue, and which what they are to let up."""

    HALVES = "halves"
    """First the columns of all gates, then those of all ups: the rows of a weight [gate; up]."""
    INTERLEAVED = "interleaved"
    """A column of a gate, one of its up, and so on."""


@dataclass(frozen=True, kw_only=True)
class GateFormRow:
    """What is known of a form of gated epilogues.

    Attributes:
        product_columns, out_columns: The result has so many columns for so many of the product.
        parts: How many parts of equal width the result has; each begins at an aligned address.
        is_gradient: Whether it is the gradient of a gate.
        has_sums: Whether it has a second result, sums of rows.
    """

    product_columns: int
    out_columns: int
    parts: int
    is_gradient: bool = False
    has_sums: bool = False


class GateForm(RowEnum):
    """What a gated epilogue stores.

    Training needs the product again, for the gradient of the gate. So one form stores it beside
    what the gate gives, and one computes that gradient from it: its own product is the gradient of
    what the gate gave, and each column gives those of a gate and of its up. Where gates and ups
    have a weight each, one form multiplies with that of ups, reads the product of gates, and stores
    ups and behind them what the gate gives. Where rows get weights, the gradient of such a weight
    is the sum of what the gate gave times its gradient: one form gives these sums as well.
    """

    row: GateFormRow

    JOINED = "joined", GateFormRow(product_columns=2, out_columns=1, parts=1)
    KEPT = "kept", GateFormRow(product_columns=2, out_columns=3, parts=3)
    GRADIENT = "gradient", GateFormRow(product_columns=1, out_columns=2, parts=2, is_gradient=True)
    GRADIENT_SUMS = (
        "gradient_sums",
        GateFormRow(product_columns=1, out_columns=2, parts=2, is_gradient=True, has_sums=True),
    )
    UPS = "ups", GateFormRow(product_columns=1, out_columns=2, parts=2)

    @property
    def has_pairs(self) -> bool:
        """Whether the columns of B are gates and ups."""
        return self.row.product_columns > 1

    @property
    def is_gradient(self) -> bool:
        """Whether it is the gradient of a gate, with sums or without."""
        return self.row.is_gradient


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """What is known of a gate: what becomes of a pair (gate, up) of columns of a product.

    Attributes:
        activation: What is applied to gates, which then multiply ups.
        is_biased: Whether a row of n is added to the product first.
        alpha: Gates are multiplied by it inside the activation's sigmoid alone.
        limit: Gates are cut off above at this, ups on both sides, and 1 is added to ups; None for
            neither.
        aliases: What people call it who look for its name.
    """

    activation: Activation
    is_biased: bool = False
    alpha: float = 1.0
    limit: float | None = None
    aliases: tuple[str, ...] = ()


class Gate(RowEnum):
    """How a gated epilogue makes one column of the result of two of the product.

    ``swiglu`` and ``geglu`` give ``activation(gate) * up``, the latter with gelu's tanh form, for
    models with gated gelu name that (``gelu_pytorch_tanh`` in the configs of Gemma). ``swiglu_oai``
    gives ``gate * sigmoid(alpha * gate) * (up + 1)`` of gates and ups cut off at the limit.
    """

    row: GateRow

    SWIGLU = "swiglu", GateRow(activation=Activation.SILU, aliases=("silu_and_mul",))
    GEGLU = "geglu", GateRow(activation=Activation.GELU_TANH, aliases=("gelu_and_mul",))
    # The constants of gpt-oss: alpha stands in its published code (openai/gpt-oss, swiglu in
    # gpt_oss/torch/model.py; GptOssExperts of transformers), the limit is swiglu_limit of its
    # configs. Other numbers would be another row, so that a signature says all of what a kernel
    # computes, and a launch passes tensors alone.
    SWIGLU_OAI = "swiglu_oai", GateRow(
        activation=Activation.SILU, is_biased=True, alpha=1.702, limit=7.0, aliases=("gpt_oss",)
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EpilogueRow:
    """What is known of an epilogue.

    Attributes:
        addend: What is added, if anything is.
        activation: What follows the sum; of a gated epilogue, what is applied to gates.
        gate: How columns of the product are joined in pairs, if they are.
        order: Where the columns of a pair stand; None without a gate.
        form: What is stored; None without a gate.
        aliases: What people call it who look for its name.
    """

    addend: Addend | None = None
    activation: Activation | None = None
    gate: Gate | None = None
    order: WeightOrder | None = None
    form: GateForm | None = None
    aliases: tuple[str, ...] = ()


def _gated(gate: Gate, order: WeightOrder, form: GateForm = GateForm.JOINED) -> EpilogueRow:
    read = {
        GateForm.GRADIENT: Addend.PRODUCT,
        GateForm.GRADIENT_SUMS: Addend.PRODUCT,
        GateForm.UPS: Addend.GATES,
    }
    return EpilogueRow(
        addend=read.get(form, Addend.ROW if gate.row.is_biased else None),
        activation=gate.row.activation,
        gate=gate,
        order=order,
        form=form,
        aliases=(gate.value, *gate.row.aliases) if form is GateForm.JOINED else (),
    )


_KEPT, _GRADIENT, _SUMS, _UPS = (
    GateForm.KEPT, GateForm.GRADIENT, GateForm.GRADIENT_SUMS, GateForm.UPS
)  # fmt: skip


class Epilogue(RowEnum):
    """What a kernel does with a product before it rounds and stores it; `row` has the steps.

    It computes in the accumulator's type, and rounds once: ``out = round(f(A @ B + addend))``. A
    gated one makes one column of the result of two of the product, so the result has n / 2. One
    that keeps the product has it in front of that. The gradient of a gate is computed from the
    product that was kept, in its order of columns, and from A @ B, the gradient of what the gate
    gave; one with sums gives, for each row, also the sum of what the gate gave times its gradient.
    Where A @ B is that of ups alone, gates are read, as they were rounded; ups are not
    rounded before they are multiplied.
    """

    row: EpilogueRow

    BIAS = "bias", EpilogueRow(addend=Addend.ROW)
    BIAS_RELU = "bias_relu", EpilogueRow(
        addend=Addend.ROW, activation=Activation.RELU, aliases=("relu",)
    )  # fmt: skip
    BIAS_GELU_TANH = "bias_gelu_tanh", EpilogueRow(
        addend=Addend.ROW, activation=Activation.GELU_TANH,
        aliases=("gelu", "gelu_tanh", "bias_gelu"),
    )  # fmt: skip
    BIAS_SILU = "bias_silu", EpilogueRow(
        addend=Addend.ROW, activation=Activation.SILU, aliases=("silu", "swish")
    )  # fmt: skip
    ADD = "add", EpilogueRow(addend=Addend.MATRIX, aliases=("residual",))
    SWIGLU_HALVES = "swiglu_halves", _gated(Gate.SWIGLU, WeightOrder.HALVES)
    SWIGLU_INTERLEAVED = "swiglu_interleaved", _gated(Gate.SWIGLU, WeightOrder.INTERLEAVED)
    GEGLU_HALVES = "geglu_halves", _gated(Gate.GEGLU, WeightOrder.HALVES)
    GEGLU_INTERLEAVED = "geglu_interleaved", _gated(Gate.GEGLU, WeightOrder.INTERLEAVED)
    SWIGLU_OAI_HALVES = "swiglu_oai_halves", _gated(Gate.SWIGLU_OAI, WeightOrder.HALVES)
    SWIGLU_OAI_INTERLEAVED = (
        "swiglu_oai_interleaved", _gated(Gate.SWIGLU_OAI, WeightOrder.INTERLEAVED)
    )  # fmt: skip
    SWIGLU_HALVES_KEPT = "swiglu_halves_kept", _gated(Gate.SWIGLU, WeightOrder.HALVES, _KEPT)
    SWIGLU_INTERLEAVED_KEPT = (
        "swiglu_interleaved_kept", _gated(Gate.SWIGLU, WeightOrder.INTERLEAVED, _KEPT)
    )  # fmt: skip
    GEGLU_HALVES_KEPT = "geglu_halves_kept", _gated(Gate.GEGLU, WeightOrder.HALVES, _KEPT)
    GEGLU_INTERLEAVED_KEPT = (
        "geglu_interleaved_kept", _gated(Gate.GEGLU, WeightOrder.INTERLEAVED, _KEPT)
    )  # fmt: skip
    SWIGLU_OAI_HALVES_KEPT = (
        "swiglu_oai_halves_kept", _gated(Gate.SWIGLU_OAI, WeightOrder.HALVES, _KEPT)
    )  # fmt: skip
    SWIGLU_OAI_INTERLEAVED_KEPT = (
        "swiglu_oai_interleaved_kept", _gated(Gate.SWIGLU_OAI, WeightOrder.INTERLEAVED, _KEPT)
    )  # fmt: skip
    SWIGLU_HALVES_GRADIENT = (
        "swiglu_halves_gradient", _gated(Gate.SWIGLU, WeightOrder.HALVES, _GRADIENT)
    )  # fmt: skip
    SWIGLU_INTERLEAVED_GRADIENT = (
        "swiglu_interleaved_gradient", _gated(Gate.SWIGLU, WeightOrder.INTERLEAVED, _GRADIENT)
    )  # fmt: skip
    GEGLU_HALVES_GRADIENT = (
        "geglu_halves_gradient", _gated(Gate.GEGLU, WeightOrder.HALVES, _GRADIENT)
    )  # fmt: skip
    GEGLU_INTERLEAVED_GRADIENT = (
        "geglu_interleaved_gradient", _gated(Gate.GEGLU, WeightOrder.INTERLEAVED, _GRADIENT)
    )  # fmt: skip
    SWIGLU_OAI_HALVES_GRADIENT = (
        "swiglu_oai_halves_gradient", _gated(Gate.SWIGLU_OAI, WeightOrder.HALVES, _GRADIENT)
    )  # fmt: skip
    SWIGLU_OAI_INTERLEAVED_GRADIENT = (
        "swiglu_oai_interleaved_gradient",
        _gated(Gate.SWIGLU_OAI, WeightOrder.INTERLEAVED, _GRADIENT),
    )  # fmt: skip
    SWIGLU_HALVES_GRADIENT_SUMS = (
        "swiglu_halves_gradient_sums", _gated(Gate.SWIGLU, WeightOrder.HALVES, _SUMS)
    )  # fmt: skip
    SWIGLU_INTERLEAVED_GRADIENT_SUMS = (
        "swiglu_interleaved_gradient_sums", _gated(Gate.SWIGLU, WeightOrder.INTERLEAVED, _SUMS)
    )  # fmt: skip
    GEGLU_HALVES_GRADIENT_SUMS = (
        "geglu_halves_gradient_sums", _gated(Gate.GEGLU, WeightOrder.HALVES, _SUMS)
    )  # fmt: skip
    GEGLU_INTERLEAVED_GRADIENT_SUMS = (
        "geglu_interleaved_gradient_sums", _gated(Gate.GEGLU, WeightOrder.INTERLEAVED, _SUMS)
    )  # fmt: skip
    SWIGLU_OAI_HALVES_GRADIENT_SUMS = (
        "swiglu_oai_halves_gradient_sums", _gated(Gate.SWIGLU_OAI, WeightOrder.HALVES, _SUMS)
    )  # fmt: skip
    SWIGLU_OAI_INTERLEAVED_GRADIENT_SUMS = (
        "swiglu_oai_interleaved_gradient_sums",
        _gated(Gate.SWIGLU_OAI, WeightOrder.INTERLEAVED, _SUMS),
    )  # fmt: skip
    # Of two weights; those of gpt-oss' gate are one. Gates and ups lie in halves for the gradient.
    SWIGLU_HALVES_UPS = "swiglu_halves_ups", _gated(Gate.SWIGLU, WeightOrder.HALVES, _UPS)
    GEGLU_HALVES_UPS = "geglu_halves_ups", _gated(Gate.GEGLU, WeightOrder.HALVES, _UPS)

    @property
    def addend(self) -> Addend | None:
        """What is added, if anything is."""
        return self.row.addend

    @property
    def reads_addend(self) -> bool:
        """Whether a gate reads what lies in the addend's place, and nothing is added."""
        return self.addend in (Addend.PRODUCT, Addend.GATES)

    @property
    def addend_has_rows(self) -> bool:
        """Whether what lies in the addend's place has a row for each of the result."""
        return self.addend not in (None, Addend.ROW)

    @property
    def activation(self) -> Activation | None:
        """What follows the sum; of a gated epilogue, what is applied to gates."""
        return self.row.activation

    @property
    def gate(self) -> Gate | None:
        """How columns of the product are joined in pairs, if they are."""
        return self.row.gate

    @property
    def form(self) -> GateForm | None:
        """What a gated epilogue stores; None without a gate."""
        return self.row.form


def find_epilogue(addend: Addend, activation: Activation | None = None) -> Epilogue | None:
    """The epilogue without a gate that adds and applies these; None where there is none."""
    wanted = (addend, activation, None)
    return next((e for e in Epilogue if (e.addend, e.activation, e.gate) == wanted), None)


def find_gated(gate: Gate, order: WeightOrder, form: GateForm = GateForm.JOINED) -> Epilogue:
    """The gated epilogue of a gate, an order and a form.

    Raises:
        KeyError: If there is none, as for the ups of a gate that has one weight alone.
    """
    return _GATED[gate, order, form]


_GATED = {(one.gate, one.row.order, one.form): one for one in Epilogue if one.gate is not None}


def addend_dtype(out: DType) -> DType:
    """Element type of what is added: the result's, or bf16 where that is too coarse for a sum."""
    return DType.BF16 if out.is_fp8 else out
