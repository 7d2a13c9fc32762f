"""Epilogues, composed of addends, activations and gates, which have a row each.

To support another activation or gate, add a row here; `types` does the same for element types.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
        aliases: Other names, for suggestions in error messages.
    """

    torch_name: str
    torch_options: Mapping[str, str] = field(default_factory=dict)
    commutes_with_rounding: bool = False
    efc_source: tuple[str, ...]
    aliases: tuple[str, ...] = ()


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
        aliases=("gelu", "bias_gelu"),
    )  # fmt: skip
    SILU = "silu", ActivationRow(
        torch_name="silu", efc_source=("D = x * sigmoid(x)",), aliases=("swish",)
    )  # fmt: skip


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
        reads: Tensor that it reads besides A and B, if any.
        is_gradient: True for a gate's gradient.
        has_sums: True if row sums are a second result.
    """

    product_columns: int
    out_columns: int
    parts: int
    reads: Addend | None = None
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
    GRADIENT = "gradient", GateFormRow(
        product_columns=1, out_columns=2, parts=2, reads=Addend.PRODUCT, is_gradient=True
    )  # fmt: skip
    GRADIENT_SUMS = "gradient_sums", GateFormRow(
        product_columns=1, out_columns=2, parts=2, reads=Addend.PRODUCT, is_gradient=True,
        has_sums=True,
    )  # fmt: skip
    UPS = "ups", GateFormRow(product_columns=1, out_columns=2, parts=2, reads=Addend.GATES)

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
        hidden_acts: Values of ``hidden_act`` in model configs that mean this gate.
        aliases: Other names, for suggestions in error messages.
    """

    activation: Activation
    is_biased: bool = False
    alpha: float = 1.0
    limit: float | None = None
    hidden_acts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


class Gate(RowEnum):
    """Function that turns a (gate, up) column pair into one result column.

    ``swiglu`` and ``geglu`` compute ``activation(gate) * up``. ``geglu`` uses the tanh form, as
    gated gelu models do (``gelu_pytorch_tanh`` in Gemma configs). ``swiglu_oai`` computes ``gate *
    sigmoid(alpha * gate) * (up + 1)`` from clamped gates and ups.
    """

    row: GateRow

    SWIGLU = "swiglu", GateRow(
        activation=Activation.SILU, hidden_acts=("silu", "swish"), aliases=("silu_and_mul",)
    )  # fmt: skip
    GEGLU = (
        "geglu",
        GateRow(
            activation=Activation.GELU_TANH,
            hidden_acts=("gelu_pytorch_tanh",),
            aliases=("gelu_and_mul",),
        ),
    )
    # gpt-oss constants: alpha comes from its published code (openai/gpt-oss, swiglu in
    # gpt_oss/torch/model.py; transformers' GptOssExperts), the limit from swiglu_limit in its
    # configs. Other values need another row: a signature fully defines the computation, and a
    # launch passes only tensors.
    SWIGLU_OAI = "swiglu_oai", GateRow(
        activation=Activation.SILU, is_biased=True, alpha=1.702, limit=7.0, aliases=("gpt_oss",)
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Epilogue:
    """Steps between a product and its stored result: an addend and an activation, or a gate.

    Computes in the accumulator dtype and rounds once: ``out = round(f(A @ B + addend))``. A gate
    combines two product columns into one, so the result has n / 2 columns; `GateForm` has the other
    layouts. A gradient reads the kept product in its column order. The ``ups`` form reads rounded
    gates and multiplies them by unrounded ups.

    `ALL_EPILOGUES` has all instances, and `parse`, `find_epilogue` and `find_gated` return them.
    Copies are the same object, so `is` compares epilogues, and a hash costs no more than an enum
    member's.

    Attributes:
        name: Text in keys, manifests and messages, e.g. ``bias_relu`` or ``swiglu_halves_kept``.
        addend: Tensor kind that it adds or reads, if any.
        activation: Function applied to the sum; with a gate, to the gates.
        gate: Gate that combines column pairs, if any.
        order: Gate and up column order; None without a gate.
        form: Result layout; None without a gate.
    """

    name: str
    addend: Addend | None
    activation: Activation | None = None
    gate: Gate | None = None
    order: WeightOrder | None = None
    form: GateForm | None = None

    @classmethod
    def parse(cls, name: Epilogue | str) -> Epilogue:
        """Returns the epilogue with a name; an epilogue is returned as it is.

        Raises:
            ValueError: If none has the name.
        """
        if isinstance(name, Epilogue):
            return name
        epilogue = _BY_NAME.get(name) if isinstance(name, str) else None
        if epilogue is None:
            raise ValueError(f"{name!r} is not a valid Epilogue")
        return epilogue

    @property
    def reads_addend(self) -> bool:
        """True if a gate reads the addend operand instead of adding it."""
        return self.addend in (Addend.PRODUCT, Addend.GATES)

    @property
    def addend_has_rows(self) -> bool:
        """True if the addend operand has one row per result row."""
        return self.addend not in (None, Addend.ROW)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names, for suggestions in error messages."""
        part = self.gate or self.activation
        if part is None or self.form not in (None, GateForm.JOINED):
            return ()
        return (part.value, *part.row.aliases)

    def __repr__(self) -> str:
        return f"Epilogue.parse({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], Epilogue], tuple[str]]:
        return Epilogue.parse, (self.name,)  # copies and pickles give the same object

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> Any:
        """Returns the schema by which pydantic stores the name and reads the same object back."""
        from pydantic_core import core_schema  # pydantic calls this: only the builder has it

        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda epilogue: epilogue.name
            ),
        )


def _plain(addend: Addend, activation: Activation | None = None) -> Epilogue:
    first = {Addend.ROW: "bias", Addend.MATRIX: "add"}[addend]
    name = first if activation is None else f"{first}_{activation.value}"
    return Epilogue(name=name, addend=addend, activation=activation)


def _gated(gate: Gate, order: WeightOrder, form: GateForm) -> Epilogue:
    name = f"{gate.value}_{order.value}"
    return Epilogue(
        name=name if form is GateForm.JOINED else f"{name}_{form.value}",
        addend=form.row.reads or (Addend.ROW if gate.row.is_biased else None),
        activation=gate.row.activation,
        gate=gate,
        order=order,
        form=form,
    )


def _has_form(gate: Gate, order: WeightOrder, form: GateForm) -> bool:
    """Returns True if kernels may have a gate in this form.

    Separate gate and up weights have no column order, and their gradient needs halves. The gates
    take the addend's place, so a gate with a bias needs one weight.
    """
    return form is not GateForm.UPS or (order is WeightOrder.HALVES and not gate.row.is_biased)


ALL_EPILOGUES = (
    _plain(Addend.ROW),
    *(_plain(Addend.ROW, activation) for activation in Activation),
    _plain(Addend.MATRIX),
    *(
        _gated(gate, order, form)
        for form, gate, order in itertools.product(GateForm, Gate, WeightOrder)
        if _has_form(gate, order, form)
    ),
)
"""All epilogues, in the order in which messages and schemas list them."""

_BY_NAME = {epilogue.name: epilogue for epilogue in ALL_EPILOGUES}
_PLAIN = {(one.addend, one.activation): one for one in ALL_EPILOGUES if one.gate is None}
_GATED = {(one.gate, one.order, one.form): one for one in ALL_EPILOGUES if one.gate is not None}

BIAS = _BY_NAME["bias"]
"""Epilogue that adds a row with n values."""

ADD = _BY_NAME["add"]
"""Epilogue that adds a matrix in the result's shape."""


def find_epilogue(addend: Addend, activation: Activation | None = None) -> Epilogue | None:
    """Returns the ungated epilogue for an addend and an activation; None if none exists."""
    return _PLAIN.get((addend, activation))


def find_gated(gate: Gate, order: WeightOrder, form: GateForm = GateForm.JOINED) -> Epilogue:
    """Returns the gated epilogue for a gate, an order and a form.

    Raises:
        KeyError: If none exists, for example the ``ups`` form for a gate with a bias.
    """
    return _GATED[gate, order, form]


def addend_dtype(out: DType) -> DType:
    """Returns the addend's dtype: the result's, or bf16 for fp8 results, too coarse for sums."""
    return DType.BF16 if out.is_fp8 else out
