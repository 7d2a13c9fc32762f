"""Tables for activations, gates and epilogues, one row each.

To support another one, add a row here; `types` does the same for element types.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .types import DType, RowEnum


@dataclass(frozen=True, kw_only=True)
class ActivationRow:
    """Facts about an activation.

    Attributes:
        torch_name: Function in ``torch.nn.functional``.
        torch_options: Keyword arguments for that function.
        commutes_with_rounding: True if rounding before or after it gives the same result.
        efc_source: Statements that compute ``D`` from ``x``, in the `cutlass.operators` epilogue
            language.
    """

    torch_name: str
    torch_options: Mapping[str, str] = field(default_factory=dict)
    commutes_with_rounding: bool = False
    efc_source: tuple[str, ...]


class Activation(RowEnum):
    """Function that an epilogue applies to its sum; `row` has its facts."""

    row: ActivationRow

    RELU = "relu", ActivationRow(
        torch_name="relu", commutes_with_rounding=True, efc_source=("D = relu(x)",)
    )  # fmt: skip
    # Constants: sqrt(2 / pi), and 0.044715 from Hendrycks and Gimpel, 2016. The language's built-in
    # gelu and silu raise KeyError (cutlass.operators 0.3.0).
    GELU_TANH = "gelu_tanh", ActivationRow(
        torch_name="gelu", torch_options={"approximate": "tanh"}, efc_source=(
            "t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))",
            "D = 0.5 * x * (1.0 + t)",
        ),
    )  # fmt: skip
    SILU = "silu", ActivationRow(torch_name="silu", efc_source=("D = x * sigmoid(x)",))


class Addend(enum.Enum):
    """Tensor that an epilogue adds or reads."""

    ROW = "row"
    """Vector with n values, added to each row."""
    MATRIX = "matrix"
    """Matrix (or a batch) in the result's shape, added elementwise."""
    PRODUCT = "product"
    """Kept product with gates and ups [m, 2 n]; read, not added."""
    GATES = "gates"
    """Gate product [m, n]; read, not added."""


class WeightOrder(enum.Enum):
    """Order in which B's columns hold gates and ups."""

    HALVES = "halves"
    """All gate columns, then all up columns: weight rows [gate; up]."""
    INTERLEAVED = "interleaved"
    """Gate and up columns alternate, gate first."""


@dataclass(frozen=True, kw_only=True)
class GateFormRow:
    """Facts about a gated epilogue form.

    Attributes:
        product_columns, out_columns: `product_columns` columns of the product give `out_columns` of
            the result.
        parts: Number of equally wide parts in the result; each begins at an aligned address.
        is_gradient: True for a gate's gradient.
        has_sums: True if row sums are a second result.
    """

    product_columns: int
    out_columns: int
    parts: int
    is_gradient: bool = False
    has_sums: bool = False


class GateForm(RowEnum):
    """Result layout for a gated epilogue.

    - ``joined`` stores the gated values.
    - ``kept`` stores the product, then the gated values; training needs the product for the
      gradient.
    - ``gradient`` computes the gate's gradient from the kept product. A @ B is the gradient for the
      gated values, and each column gives a gate gradient and an up gradient.
    - ``gradient_sums`` also returns, per row, the sum over gated values times their gradients: the
      routing weight's gradient.
    - ``ups`` serves gates and ups with separate weights. It multiplies with the up weight, reads
      the gate product, and stores the ups, then the gated values.
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
        """True if B's columns are gates and ups."""
        return self.row.product_columns > 1

    @property
    def is_gradient(self) -> bool:
        """True for a gate's gradient, with or without sums."""
        return self.row.is_gradient


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """Facts about a gate, which combines a (gate, up) column pair.

    Attributes:
        activation: Function applied to gates before they multiply ups.
        is_biased: True if a row with n values is added to the product first.
        alpha: Factor for gates inside the activation's sigmoid only; needs a limit.
        limit: Clamp for gates (from above) and ups (both sides); 1 is then added to ups, and the
            activation is silu. None for neither.
        aliases: Other names, for suggestions in error messages.
    """

    activation: Activation
    is_biased: bool = False
    alpha: float = 1.0
    limit: float | None = None
    aliases: tuple[str, ...] = ()


class Gate(RowEnum):
    """Function that turns a (gate, up) column pair into one result column.

    ``swiglu`` and ``geglu`` compute ``activation(gate) * up``. ``geglu`` uses the tanh form, as
    gated gelu models do (``gelu_pytorch_tanh`` in Gemma configs). ``swiglu_oai`` computes ``gate *
    sigmoid(alpha * gate) * (up + 1)`` from clamped gates and ups.
    """

    row: GateRow

    SWIGLU = "swiglu", GateRow(activation=Activation.SILU, aliases=("silu_and_mul",))
    GEGLU = "geglu", GateRow(activation=Activation.GELU_TANH, aliases=("gelu_and_mul",))
    # gpt-oss constants: alpha comes from its published code (openai/gpt-oss, swiglu in
    # gpt_oss/torch/model.py; transformers' GptOssExperts), the limit from swiglu_limit in its
    # configs. Other values need another row: a signature fully defines the computation, and a
    # launch passes only tensors.
    SWIGLU_OAI = "swiglu_oai", GateRow(
        activation=Activation.SILU, is_biased=True, alpha=1.702, limit=7.0, aliases=("gpt_oss",)
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EpilogueRow:
    """Facts about an epilogue.

    Attributes:
        addend: Tensor kind that it adds or reads, if any.
        activation: Function applied to the sum; with a gate, to the gates.
        gate: Gate that combines column pairs, if any.
        order: Gate and up column order; None without a gate.
        form: Result layout; None without a gate.
        aliases: Other names, for suggestions in error messages.
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
    """Steps between a product and its stored result; `row` has them.

    Computes in the accumulator dtype and rounds once: ``out = round(f(A @ B + addend))``. A gate
    combines two product columns into one, so the result has n / 2 columns; `GateForm` has the other
    layouts. A gradient reads the kept product in its column order. The ``ups`` form reads rounded
    gates and multiplies them by unrounded ups.
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
    # For separate gate and up weights; gpt-oss has one weight. The gradient needs halves order.
    SWIGLU_HALVES_UPS = "swiglu_halves_ups", _gated(Gate.SWIGLU, WeightOrder.HALVES, _UPS)
    GEGLU_HALVES_UPS = "geglu_halves_ups", _gated(Gate.GEGLU, WeightOrder.HALVES, _UPS)

    @property
    def addend(self) -> Addend | None:
        """Tensor kind that it adds or reads, if any."""
        return self.row.addend

    @property
    def reads_addend(self) -> bool:
        """True if a gate reads the addend operand instead of adding it."""
        return self.addend in (Addend.PRODUCT, Addend.GATES)

    @property
    def addend_has_rows(self) -> bool:
        """True if the addend operand has one row per result row."""
        return self.addend not in (None, Addend.ROW)

    @property
    def activation(self) -> Activation | None:
        """Function applied to the sum; with a gate, to the gates."""
        return self.row.activation

    @property
    def gate(self) -> Gate | None:
        """Gate that combines column pairs, if any."""
        return self.row.gate

    @property
    def form(self) -> GateForm | None:
        """Result layout for a gated epilogue; None without a gate."""
        return self.row.form


def find_epilogue(addend: Addend, activation: Activation | None = None) -> Epilogue | None:
    """Returns the ungated epilogue for an addend and an activation; None if none exists."""
    key = (addend, activation, None)
    return next((e for e in Epilogue if (e.addend, e.activation, e.gate) == key), None)


def find_gated(gate: Gate, order: WeightOrder, form: GateForm = GateForm.JOINED) -> Epilogue:
    """Returns the gated epilogue for a gate, an order and a form.

    Raises:
        KeyError: If none exists, for example the ``ups`` form for a gate with a single weight.
    """
    return _GATED[gate, order, form]


_GATED = {
    (epilogue.gate, epilogue.row.order, epilogue.form): epilogue
    for epilogue in Epilogue
    if epilogue.gate is not None
}


def addend_dtype(out: DType) -> DType:
    """Returns the addend's dtype: the result's, or bf16 for fp8 results, too coarse for sums."""
    return DType.BF16 if out.is_fp8 else out
