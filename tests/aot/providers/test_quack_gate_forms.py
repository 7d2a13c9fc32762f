"""The provider quack: kernels that keep a gate's product, those of its gradient, and of ups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from nvgemm_aot.providers import Candidate
from nvgemm_aot.providers.quack import Quack, activation_functions, gate_gradient, gate_ups, gated
from nvgemm_aot.providers.quack.designs import Design
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.epilogues import (
    ALL_EPILOGUES,
    Epilogue,
    Gate,
    GateForm,
    WeightOrder,
    find_gated,
)
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import SUMMED_COLUMNS
from nvgemm_runtime.moe.activations import GatedActivation

HOPPER = "sm_90a"

ARCHITECTURES = ["sm_90a", "sm_100f", "sm_100a", "sm_103a"]
KEPT = [one for one in ALL_EPILOGUES if one.form is GateForm.KEPT]
GRADIENTS = [one for one in ALL_EPILOGUES if one.form is not None and one.form.is_gradient]
UPS = [one for one in ALL_EPILOGUES if one.form is GateForm.UPS]


def offered(signature: Signature, arch: str) -> tuple[Candidate, ...]:
    found = Quack().enumerate(signature, build_target(arch))
    assert found.absence is None
    assert len({one.operator for one in found.candidates}) == len(found.candidates) >= 15
    assert not any(one.has_workspace or one.design.swapped for one in found.candidates)
    assert all(one.is_deterministic for one in found.candidates)
    return found.candidates


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("epilogue", KEPT)
def test_keeps_products_where_gates_are_joined(arch: str, epilogue: Epilogue) -> None:
    """With the same tensors: the product stands in the result."""
    assert epilogue.gate is not None
    assert epilogue.order is not None
    joined = find_gated(epilogue.gate, epilogue.order)
    for dtype, layout in itertools.product(("bf16", "fp16"), ("tn", "tt")):
        key = f"grouped_mm/{layout}/{dtype}x{dtype}/fp32/{dtype}"
        signature = Signature.parse(f"{key}/{epilogue.name}")
        beside = Quack().enumerate(Signature.parse(f"{key}/{joined.name}"), build_target(arch))
        if beside.absence is not None:
            assert Quack().enumerate(signature, build_target(arch)).absence is not None
            continue
        found = offered(signature, arch)
        assert all("GroupedGatedKept" in one.operator for one in found)
        assert {one.calling_convention for one in found} == {
            one.calling_convention for one in beside.candidates
        }
        assert {one.design for one in found} <= {one.design for one in beside.candidates}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("epilogue", GRADIENTS)
def test_gradients_read_the_product_in_both_layouts(arch: str, epilogue: Epilogue) -> None:
    told = "clusters," if arch == HOPPER else ""
    for dtype, layout in itertools.product(("bf16", "fp16"), ("tn", "tt")):
        key = f"grouped_mm/{layout}/{dtype}x{dtype}/fp32/{dtype}/{epilogue.name}"
        found = offered(Signature.parse(key), arch)
        assert all("GroupedGateGradient" in one.operator for one in found)
        conventions = {one.calling_convention for one in found}
        sums = "sums," if epilogue.form is GateForm.GRADIENT_SUMS else ""
        assert conventions == {f"tvm_ffi:gemm(a,b,offsets,addend,{sums}out,{told}stream)"}
        if sums:
            tiles = [one.block_shape.tile for one in found if one.block_shape is not None]
            assert len(tiles) == len(found)
            assert min(n for _, n, _ in tiles) >= SUMMED_COLUMNS


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("epilogue", UPS)
def test_ups_read_gates_in_both_layouts(arch: str, epilogue: Epilogue) -> None:
    """In every design of groups."""
    told = "clusters," if arch == HOPPER else ""
    for dtype, layout in itertools.product(("bf16", "fp16"), ("tn", "tt")):
        key = f"grouped_mm/{layout}/{dtype}x{dtype}/fp32/{dtype}"
        found = offered(Signature.parse(f"{key}/{epilogue.name}"), arch)
        assert all("GroupedGateUps" in one.operator for one in found)
        conventions = {one.calling_convention for one in found}
        assert conventions == {f"tvm_ffi:gemm(a,b,offsets,addend,out,{told}stream)"}
        assert [one.design for one in found] == [
            one.design for one in offered(Signature.parse(key), arch)
        ]


@pytest.mark.parametrize("epilogue", [*KEPT, *GRADIENTS, *UPS])
def test_only_groups_have_these_forms(epilogue: Epilogue) -> None:
    signature = Signature.parse(f"mm/tn/bf16xbf16/fp32/bf16/{epilogue.name}")
    found = Quack().enumerate(signature, build_target(HOPPER))
    assert not found.candidates
    assert f"mm has no {epilogue.name}, grouped_mm has" in str(found.absence)


@pytest.mark.parametrize(
    ("epilogue", "parts"),
    [
        ("swiglu_halves_kept", ["gate", "groups", "activation"]),
        ("swiglu_halves_gradient", ["gate", "gradient", "groups", "activation"]),
        ("swiglu_halves_ups", ["gate", "gradient", "ups", "groups", "activation"]),
    ],
)
def test_cache_keys_hold_the_source_of_every_part(epilogue: str, parts: list[str]) -> None:
    signature = Signature.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16/{epilogue}")
    (code,) = {one.added_code for one in offered(signature, HOPPER)}
    assert [part.split()[0] for part in code.split(", ")] == parts


@pytest.mark.parametrize(
    ("tile", "pingpong", "sums"),
    [
        ((256, 128), False, 128),
        ((128, 256), False, 128),
        ((64, 256), False, 128),
        ((192, 128), False, 64),
        ((192, 128), True, 192),
        ((128, 208), True, 208),
    ],
)
def test_a_thread_keeps_its_share_of_the_sums(
    tile: tuple[int, int], pingpong: bool, sums: int
) -> None:
    assert Design(tile=tile, cluster=(1, 1), pingpong=pingpong).sums_of_a_thread == sums


@pytest.mark.parametrize(
    ("form", "order", "most"),
    [
        (GateForm.JOINED, WeightOrder.INTERLEAVED, 192),
        (GateForm.KEPT, WeightOrder.HALVES, 192),
        (GateForm.KEPT, WeightOrder.INTERLEAVED, 160),
        (GateForm.GRADIENT, WeightOrder.HALVES, 192),
        (GateForm.GRADIENT, WeightOrder.INTERLEAVED, 192),
        (GateForm.GRADIENT_SUMS, WeightOrder.HALVES, 160),
        (GateForm.GRADIENT_SUMS, WeightOrder.INTERLEAVED, 160),
        (GateForm.UPS, WeightOrder.HALVES, 208),
    ],
)
def test_leaves_out_designs_that_spill_on_hopper(
    form: GateForm, order: WeightOrder, most: int
) -> None:
    epilogue = find_gated(Gate.SWIGLU, order, form)
    signature = Signature.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16/{epilogue.name}")
    module = gate_gradient if form.is_gradient else gate_ups if form is GateForm.UPS else gated
    found = module.designs(HOPPER, signature)
    assert max(one.sums_of_a_thread for one in found) == most


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("gate", [*Gate])
def test_gradients_are_those_of_torch(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's numbers, of which the kernels' functions know nothing."""
    from cutlass import cute

    monkeypatch.setattr(cute, "jit", lambda function: function)
    for module in (activation_functions, gate_gradient):
        monkeypatch.setattr(module, "sigmoid", sigmoid)
    gradients = gate_gradient._gradients(gate)
    activation = GatedActivation(kind=gate, alpha=gate.row.alpha, limit=gate.row.limit or math.inf)
    values = (-9.0, -7.0, -2.5, -0.3, 0.0, 0.7, 3.1, 7.0, 9.5)
    for one, up, grad in itertools.product(values, values, (-1.5, 0.25)):
        tensors = (torch.tensor(value, dtype=torch.float64) for value in (one, up, grad))
        wanted = [found.item() for found in activation.gradients(*tensors)]
        gave = activation.apply(*(torch.tensor(value, dtype=torch.float64) for value in (one, up)))
        wanted.append(grad * gave.item())
        assert list(gradients(one, up, grad)) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
