"""The operators of `nvgemm_runtime.moe` as the grouped products that their kernels compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvgemm_runtime.gemm.aten import AtenGemm
from nvgemm_runtime.gemm.moe_operators import (
    COLUMNS,
    GATE_GRADIENT,
    GATED_ROWS,
    GATHERED_ROWS,
    NAMESPACE,
    OPERATORS,
    PAIRED_ROWS,
    ROWS,
    read_product,
    read_products,
)
from nvgemm_runtime.gemm.operands import Operand
from nvgemm_runtime.moe import products
from nvgemm_runtime.recording.declarable import declarable


def operand(*shape: int, strides: tuple[int, ...] = (), address: int = 256) -> Operand:
    compact = torch.empty(shape, device="meta").stride()
    return Operand(
        dtype=torch.bfloat16 if len(shape) > 1 else torch.int32,
        device=torch.device("cpu"),
        shape=shape,
        strides=strides or compact,
        address=address,
    )


def read(name: str, a: Operand, b: Operand, *out: int) -> AtenGemm:
    return read_product(name, a, b, operand(4), operand(*out))


def key(gemm: AtenGemm) -> str:
    problem = declarable(gemm)
    assert not isinstance(problem, str), problem
    return problem.key


@pytest.mark.parametrize(
    ("strides", "layout"),
    [((2048, 32, 1), "tt"), ((2048, 1, 64), "tn"), ((4096, 2, 128), "tt")],
    ids=["row-major", "column-major", "copied"],
)
def test_rows_have_the_layout_of_the_weights(strides: tuple[int, ...], layout: str) -> None:
    gemm = read(ROWS, operand(48, 64), operand(4, 64, 32, strides=strides), 48, 32)
    assert key(gemm) == f"grouped_mm/{layout}/bf16xbf16/fp32/bf16/g4m48n32k64"


def test_columns_multiply_the_transposed_rows() -> None:
    gemm = read(COLUMNS, operand(48, 64), operand(48, 32), 4, 64, 32)
    assert key(gemm) == "k_grouped_mm/nt/bf16xbf16/fp32/bf16/g4m64n32k48"


def test_a_bias_is_an_epilogue() -> None:
    """A view that a kernel could not take is copied."""
    for bias in (operand(4, 32), operand(4, 32, strides=(65, 2), address=258)):
        rows = operand(48, 64), operand(4, 64, 32), operand(4), operand(48, 32)
        problem = key(read_product(ROWS, *rows, bias=bias))
        assert problem == "grouped_mm/tt/bf16xbf16/fp32/bf16/bias/g4m48n32k64"


def test_a_view_that_the_operator_copies_counts_as_its_aligned_copy() -> None:
    odd = operand(48, 64, strides=(65, 1), address=258)
    gemm = read(COLUMNS, odd, operand(48, 32), 4, 64, 32)
    assert key(gemm) == "k_grouped_mm/nt/bf16xbf16/fp32/bf16/g4m64n32k48"
    kept = read(ROWS, odd, operand(4, 64, 32), 48, 32)
    assert "aligned to 2 bytes" in str(declarable(kept)), "rows are not copied"


def test_names_are_those_of_the_operators() -> None:
    assert products.__name__  # its import defines them
    for name in (ROWS, COLUMNS):
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        names = [argument.name for argument in overload._schema.arguments]
        assert names == ["a", "b", "offsets", *(["bias"] if name == ROWS else [])]
    with pytest.raises(KeyError):
        read("neither", operand(48, 64), operand(48, 32), 4, 64, 32)


WEIGHTS = (2048, 1, 64)
"""Strides of weights [4, 32, 64] as a product takes them: [4, 64, 32]."""


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (ROWS, {"bias": operand(4, 32)}, ["grouped_mm/tn/bf16xbf16/fp32/bf16/bias/g4m48n32k64"]),
        (GATED_ROWS, {}, ["grouped_mm/tn/bf16xbf16/fp32/bf16/g4m48n32k64"]),
        (
            GATED_ROWS,
            {"bias": operand(4, 32), "epilogue": "swiglu_oai_halves"},
            ["grouped_mm/tn/bf16xbf16/fp32/bf16/bias/g4m48n32k64"],
        ),
        (
            PAIRED_ROWS,
            {"bias_up": operand(4, 32)},
            [
                "grouped_mm/tn/bf16xbf16/fp32/bf16/g4m48n32k64",
                "grouped_mm/tn/bf16xbf16/fp32/bf16/bias/g4m48n32k64",
            ],
        ),
        (
            GATE_GRADIENT,
            {"gates": operand(48, 64, strides=(96, 1)), "epilogue": "swiglu_halves_gradient"},
            ["grouped_mm/tn/bf16xbf16/fp32/bf16/g4m48n32k64"],
        ),
    ],
)
def test_products_are_those_behind_which_the_gate_is(
    name: str, given: dict[str, object], expected: list[str]
) -> None:
    b = operand(4, 64, 32, strides=WEIGHTS)
    weights = {"b_gate": b, "b_up": b} if name == PAIRED_ROWS else {"b": b}
    rows = {"grad" if name == GATE_GRADIENT else "a": operand(48, 64)}
    found = read_products(name, {**rows, **weights, "offsets": operand(4), **given})
    assert [key(one) for one in found] == expected


def test_products_of_columns() -> None:
    given = {"a": operand(48, 64), "b": operand(48, 32), "offsets": operand(4)}
    (found,) = read_products(COLUMNS, given)
    assert key(found) == "k_grouped_mm/nt/bf16xbf16/fp32/bf16/g4m64n32k48"
    with pytest.raises(KeyError):
        read_products("routed_experts", given)


@pytest.mark.parametrize("rows", ["int32", "int64", None])
@pytest.mark.parametrize("pitch", [32, 33])
def test_sums_of_rows(rows: str | None, pitch: int) -> None:
    """Whatever the call has, a kernel is given weights in fp32, rows in int32, and aligned rows."""
    matrix = replace(operand(64, 32), strides=(pitch, 1))
    given = {"matrix": matrix, "weights": operand(64, 1)}
    if rows is not None:
        given |= {"rows": replace(operand(12, 4), dtype=getattr(torch, rows)), "weights": None}
    (found,) = read_products(GATHERED_ROWS, given)
    sizes = "m64n32k1" if rows is None else "m12n32k4"
    assert key(found) == f"gathered_mm/tt/fp32xbf16/fp32/bf16/{sizes}"
    assert found.b.strides == (32, 1)


def test_operators_that_multiply_are_defined_and_have_the_arguments_that_are_read() -> None:
    for name in OPERATORS:
        schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
        named = {argument.name for argument in schema.arguments}
        if name == GATHERED_ROWS:
            assert named == {"matrix", "rows", "weights"}
            continue
        assert {"offsets"} < named
        assert {"a", "b_gate", "b_up"} < named or "b" in named
