"""That epilogues are composed of their parts, have stable names, and stay one object a name."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from pydantic import TypeAdapter

from nvgemm_runtime.gemm.epilogues import (
    ADD,
    ALL_EPILOGUES,
    BIAS,
    Activation,
    Addend,
    Epilogue,
    Gate,
    GateForm,
    WeightOrder,
    find_epilogue,
    find_gated,
)
from nvgemm_runtime.gemm.problem import Signature

SIGNATURES = TypeAdapter(Signature)

NAMES = [
    "bias",
    "bias_relu",
    "bias_gelu_tanh",
    "bias_silu",
    "add",
    "swiglu_halves",
    "swiglu_interleaved",
    "geglu_halves",
    "geglu_interleaved",
    "swiglu_oai_halves",
    "swiglu_oai_interleaved",
    "swiglu_halves_kept",
    "swiglu_interleaved_kept",
    "geglu_halves_kept",
    "geglu_interleaved_kept",
    "swiglu_oai_halves_kept",
    "swiglu_oai_interleaved_kept",
    "swiglu_halves_gradient",
    "swiglu_interleaved_gradient",
    "geglu_halves_gradient",
    "geglu_interleaved_gradient",
    "swiglu_oai_halves_gradient",
    "swiglu_oai_interleaved_gradient",
    "swiglu_halves_gradient_sums",
    "swiglu_interleaved_gradient_sums",
    "geglu_halves_gradient_sums",
    "geglu_interleaved_gradient_sums",
    "swiglu_oai_halves_gradient_sums",
    "swiglu_oai_interleaved_gradient_sums",
    "swiglu_halves_ups",
    "geglu_halves_ups",
]
"""Bundles, manifests and schemas have these names: a new one may join them, none may change."""


def test_names_and_their_order_are_those_of_bundles_and_schemas() -> None:
    assert [epilogue.name for epilogue in ALL_EPILOGUES] == NAMES


def test_parts_name_an_epilogue() -> None:
    biased = Epilogue.parse("bias_gelu_tanh")
    assert (biased.addend, biased.activation) == (Addend.ROW, Activation.GELU_TANH)
    assert (biased.gate, biased.order, biased.form) == (None, None, None)
    gated = Epilogue.parse("swiglu_oai_interleaved_kept")
    assert (gated.gate, gated.order) == (Gate.SWIGLU_OAI, WeightOrder.INTERLEAVED)
    assert (gated.form, gated.activation) == (GateForm.KEPT, Activation.SILU)
    assert gated.addend is Addend.ROW


@pytest.mark.parametrize("epilogue", ALL_EPILOGUES)
def test_every_way_to_an_epilogue_gives_the_same_object(epilogue: Epilogue) -> None:
    assert Epilogue.parse(epilogue.name) is epilogue
    assert Epilogue.parse(epilogue) is epilogue
    assert copy.copy(epilogue) is epilogue
    assert copy.deepcopy(epilogue) is epilogue
    assert pickle.loads(pickle.dumps(epilogue)) is epilogue
    signature = Signature.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16/{epilogue.name}")
    assert signature.epilogue is epilogue
    assert eval(repr(epilogue)) is epilogue
    stored = SIGNATURES.dump_json(signature)  # as in the cache of plans
    assert f'"epilogue":"{epilogue.name}"'.encode() in stored
    assert SIGNATURES.validate_json(stored).epilogue is epilogue
    if epilogue.gate is None:
        assert epilogue.addend is not None
        assert find_epilogue(epilogue.addend, epilogue.activation) is epilogue
    else:
        assert epilogue.order is not None
        assert epilogue.form is not None
        assert find_gated(epilogue.gate, epilogue.order, epilogue.form) is epilogue


def test_a_hash_and_a_comparison_are_those_of_an_object() -> None:
    """Keys of launches and of found kernels hold epilogues: both cost no Python call."""
    assert Epilogue.__hash__ is object.__hash__
    assert Epilogue.__eq__ is object.__eq__


def test_constants_are_the_epilogues_of_products_without_an_activation() -> None:
    assert find_epilogue(Addend.ROW) is BIAS
    assert find_epilogue(Addend.MATRIX) is ADD
    assert find_epilogue(Addend.MATRIX, Activation.RELU) is None


@pytest.mark.parametrize("name", ["BIAS", "bias_", "swiglu", "swiglu_oai_halves_ups", None, 3, []])
def test_refuses_other_names(name: object) -> None:
    with pytest.raises(ValueError, match="is not a valid Epilogue"):
        Epilogue.parse(name)  # type: ignore[arg-type]


def test_other_names_lead_to_epilogues_that_a_user_writes() -> None:
    aliases = {epilogue.name: {*epilogue.aliases} for epilogue in ALL_EPILOGUES}
    assert aliases["bias"] == aliases["swiglu_halves_kept"] == set()
    assert aliases["bias_gelu_tanh"] == {"gelu", "gelu_tanh", "bias_gelu"}
    assert aliases["bias_silu"] == {"silu", "swish"}
    assert aliases["swiglu_halves"] == aliases["swiglu_interleaved"] == {"swiglu", "silu_and_mul"}


@pytest.mark.parametrize("activation", Activation)
def test_every_activation_is_a_function_of_torch_and_has_an_epilogue(
    activation: Activation,
) -> None:
    function = getattr(torch.nn.functional, activation.row.torch_name)
    assert function(torch.zeros(1), **activation.row.torch_options).item() == 0.0
    assert activation in {epilogue.activation for epilogue in ALL_EPILOGUES}


def test_every_gate_has_every_form_in_every_order_but_ups_of_one_weight() -> None:
    """A weight of gates and one of ups are halves, and those of gpt-oss are one."""
    missing = set()
    for gate, order, form in itertools.product(Gate, WeightOrder, GateForm):
        try:
            found = find_gated(gate, order, form)
        except KeyError:
            missing.add((gate, order, form))
        else:
            assert (found.gate, found.order, found.form) == (gate, order, form)
    has_ups = {(Gate.SWIGLU, WeightOrder.HALVES), (Gate.GEGLU, WeightOrder.HALVES)}
    assert missing == {
        (gate, order, GateForm.UPS)
        for gate, order in itertools.product(Gate, WeightOrder)
        if (gate, order) not in has_ups
    }
