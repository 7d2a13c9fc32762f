"""What there is one of for each operation and each activation: none may be forgotten."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch._inductor import select_algorithm  # noqa: F401  (our modules come behind it)

from nvgemm_runtime.gemm.aten import OPERATORS
from nvgemm_runtime.gemm.epilogue import Activation, Epilogue
from nvgemm_runtime.gemm.operands import RANKS
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.inductor import choices, cpp, epilogue_choices, epilogue_fusion
from nvgemm_runtime.launch import native
from nvgemm_runtime.launch.fakes import OPERATORS as OURS


@pytest.mark.parametrize(
    "known",
    [
        {activation for activation, _ in epilogue_fusion._patterns()},
        epilogue_fusion._BACKENDS_NEEDED,
        epilogue_choices._FUNCTIONS,
        choices._FALLBACKS_WITH_ACTIVATION,
        {epilogue.activation for epilogue in Epilogue} - {None},
    ],
    ids=["patterns", "backends", "functions", "fallbacks", "epilogues"],
)
def test_every_activation_is_known(known: Collection[Activation]) -> None:
    assert set(known) == set(Activation)


@pytest.mark.parametrize(
    "known",
    [RANKS, {operator.op for operator in OPERATORS.values()}],
    ids=["ranks", "operators of ATen"],
)
def test_every_operation_is_known(known: Collection[Op]) -> None:
    assert set(known) == set(Op)


def test_every_operator_of_atens_has_a_fallback() -> None:
    assert set(choices._FALLBACKS) == set(OPERATORS)
    assert set(OPERATORS) >= choices._WITHOUT_CPP_CALL


def test_every_operator_of_ours_is_registered() -> None:
    native.load()
    defined = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("nvgemm_aot::") and schema.overload_name == "out"
    }
    assert defined == set(OURS)
    for name in OURS:
        for overload in ("default", "out"):
            full_name = f"nvgemm_aot::{name}" + (".out" if overload == "out" else "")
            for key in ("Autograd", "Meta"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key)


def test_generated_cpp_passes_extras_in_the_order_of_try_gemm() -> None:
    native.load()
    takes = [one.name for one in torch.ops.nvgemm_aot.try_gemm.default._schema.arguments]
    assert tuple(takes[4:]) == cpp._EXTRAS
