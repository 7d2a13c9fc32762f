"""Every operation and activation has an entry in each table of the plug-in."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch._inductor import select_algorithm  # noqa: F401  (our modules come behind it)

from nvgemm_runtime.gemm.aten import OPERATORS
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, Activation, Epilogue, Gate, GateForm
from nvgemm_runtime.gemm.operand_checks import RANKS
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.inductor.autotuning import choices
from nvgemm_runtime.inductor.codegen import cpp
from nvgemm_runtime.inductor.fusion import (
    epilogue_choices,
    epilogue_fusion,
    gated_choices,
    gated_fusion,
)
from nvgemm_runtime.launch.fakes import OPERATORS as OURS
from nvgemm_runtime.launch.loading import native


def test_every_activation_is_found_in_graphs() -> None:
    assert {activation for activation, _ in epilogue_fusion._patterns()} == {*Activation}


@pytest.mark.parametrize("activation", Activation)
def test_stock_torch_computes_an_activation_as_it_is_in_graphs(activation: Activation) -> None:
    call = choices.StockCall(op="addmm", gemm="", inputs=(), layout=None, activation=activation)
    bias, a, b, out = torch.randn(3), torch.randn(2, 4), torch.randn(4, 3), torch.empty(2, 3)
    eval(call.fallback, {"torch": torch})(bias, a, b, out=out)
    wanted = epilogue_choices._activation_function(activation)(torch.addmm(bias, a, b))
    torch.testing.assert_close(out, wanted)


def test_every_gate_is_found_in_graphs() -> None:
    assert {gate for gate, _ in gated_fusion._patterns()} == {*Gate}


@pytest.mark.parametrize("epilogue", [one for one in ALL_EPILOGUES if one.form is GateForm.JOINED])
def test_stock_torch_computes_a_gate_as_it_is_in_graphs(epilogue: Epilogue) -> None:
    op = "mm" if epilogue.addend is None else "addmm"
    call = choices.StockCall(op=op, gemm="", inputs=(), layout=None, gated=epilogue)
    given = [] if epilogue.addend is None else [4 * torch.randn(6)]
    tensors, out = [*given, 3 * torch.randn(2, 4), torch.randn(4, 6)], torch.empty(2, 3)
    eval(call.fallback, {"torch": torch})(*tensors, out=out)
    torch.testing.assert_close(out, gated_choices._in_one(epilogue)(*tensors))


@pytest.mark.parametrize(
    "known",
    [
        RANKS,
        {op for row in OPERATORS.values() for op in (row.op, row.op_of_matrices) if op is not None}
        | {Op.GATHERED_MM, Op.GATHERED_GROUPED_MM},  # which no operator of ATen computes
    ],
    ids=["ranks", "operators of ATen"],
)
def test_every_operation_is_known(known: Collection[Op]) -> None:
    assert set(known) == set(Op)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_of_atens_has_a_fallback(name: str) -> None:
    row = OPERATORS[name]
    assert callable(eval(row.stock_call, {"torch": torch}))
    assert row.product is None or OPERATORS[row.product].op is row.op
    schemas = [one for one in torch._C._jit_get_all_schemas() if one.name == f"aten::{name}"]
    assert schemas == [] or any(
        {argument.name for argument in one.arguments} >= {*row.tensors} for one in schemas
    )


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
