"""`grouped_mm` with a matrix added, by bundled kernels for the CPU: values, views, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nvgemm_runtime
from cpu_kernels import signature
from installed_bundles import id_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Epilogue
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.launch.select import load_kernel

Tensors = dict[str, torch.Tensor]
M, N, K, ENDS = 16, 32, 64, (0, 5, 6, 14)
"""Sizes, and ends of groups: an empty one, one of one row; two rows are of none."""


def grouped(epilogue: Epilogue | None, layout: str = "tn") -> Signature:
    return signature(layout, op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)


@pytest.fixture
def made(installed: BuiltBundle) -> Tensors:
    torch.manual_seed(0)
    shapes = {"a": (M, K), "w": (len(ENDS), N, K), "addend": (M, N), "bias": (len(ENDS), N)}
    made = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    return {**made, "b": made["w"].mT, "ends": torch.tensor(ENDS, dtype=torch.int32)}


def call(made: Tensors, **given: Any) -> torch.Tensor:
    return nvgemm_runtime.grouped_mm(made["a"], made["b"], made["ends"], **given)


def exact(made: Tensors, addend: torch.Tensor) -> torch.Tensor:
    """The sum in fp64, of the rows that groups have."""
    begins = (0, *ENDS[:-1])
    parts = [made["a"][i:j].double() @ one.double() for i, j, one in zip(begins, ENDS, made["b"])]
    return torch.cat(parts) + addend[: ENDS[-1]].double()


@pytest.mark.parametrize("layout", ["tn", "tt"])
def test_a_matrix_is_added_and_the_sum_is_rounded_once(made: Tensors, layout: str) -> None:
    b = made["b"] if layout == "tn" else made["b"].contiguous()
    found = call({**made, "b": b}, addend=made["addend"])
    wanted = exact(made, made["addend"])
    torch.testing.assert_close(found[: ENDS[-1]].double(), wanted, rtol=2**-8, atol=2**-20)
    twice = wanted - made["addend"][: ENDS[-1]].double()
    twice = (twice.bfloat16() + made["addend"][: ENDS[-1]]).double()
    assert (found[: ENDS[-1]].double() - wanted).abs().sum() < (twice - wanted).abs().sum()


def test_what_is_added_and_the_result_may_lie_in_wider_matrices(made: Tensors) -> None:
    wide = torch.full((M, 2 * N), 7.0).bfloat16()
    wide[:, :N] = made["addend"]
    out = wide[:, N:]
    assert call(made, addend=wide[:, :N], out=out) is out
    assert torch.equal(out[: ENDS[-1]], call(made, addend=made["addend"])[: ENDS[-1]])
    assert torch.equal(wide[:, :N], made["addend"])
    assert (out[ENDS[-1] :] == 7).all()


def test_the_sum_may_take_the_place_of_what_is_added(made: Tensors) -> None:
    wanted, added = call(made, addend=made["addend"]), made["addend"].clone()
    assert call(made, addend=added, out=added) is added
    assert torch.equal(added[: ENDS[-1]], wanted[: ENDS[-1]])
    assert torch.equal(added[ENDS[-1] :], made["addend"][ENDS[-1] :])


def test_a_matrix_of_as_many_rows_as_groups_is_told_from_a_bias(installed: BuiltBundle) -> None:
    torch.manual_seed(0)
    a, b, added = torch.randn(4, K), torch.randn(4, N, K).mT, torch.randn(4, N)
    made = {"a": a.bfloat16(), "b": b.bfloat16(), "ends": torch.tensor([4, 4, 4, 4]).int()}
    added = added.bfloat16()
    product = a.bfloat16().double() @ b[0].bfloat16().double()
    close = {"rtol": 2**-8, "atol": 2**-20}
    out = torch.empty(4, N).bfloat16()  # the same, so that nothing else tells the calls apart
    for _ in range(2):
        call(made, addend=added, out=out)
        torch.testing.assert_close(out.double(), product + added.double(), **close)
        call(made, bias=added, out=out)
        torch.testing.assert_close(out.double(), product + added[0].double(), **close)
    for name, epilogue in (("bias", ADD), ("addend", BIAS)):
        id_ = id_of(installed, grouped(epilogue))
        for kernel in (id_, load_kernel(id_)):
            with pytest.raises(ValueError, match=f"computes grouped_mm/.*/{epilogue.name}"):
                call(made, kernel=kernel, **{name: added})


def test_a_kernel_is_found_and_may_be_named(installed: BuiltBundle, made: Tensors) -> None:
    extras = ExtraOperands(offsets=made["ends"], addend=made["addend"], adds_matrix=True)
    out = torch.empty(M, N).bfloat16()
    chosen = nvgemm_runtime.choose(made["a"], made["b"], out, extras=extras)
    assert chosen.kernel.signature == grouped(ADD)
    assert nvgemm_runtime.explain(made["a"], made["b"], extras=extras).match is not None
    wanted = call(made, addend=made["addend"])
    for kernel in (chosen, id_of(installed, grouped(ADD))):
        found = call(made, addend=made["addend"], kernel=kernel)
        assert torch.equal(found[: ENDS[-1]], wanted[: ENDS[-1]])


@pytest.mark.parametrize(("m", "n", "groups"), [(0, N, 4), (M, 0, 4), (M, N, 0)])
def test_zero_sizes(installed: BuiltBundle, m: int, n: int, groups: int) -> None:
    made = {"a": torch.ones(m, K), "b": torch.ones(groups, n, K).mT}
    made = {name: one.bfloat16() for name, one in made.items()}
    ends = torch.zeros(groups, dtype=torch.int32)
    found = call({**made, "ends": ends}, addend=torch.ones(m, n).bfloat16())
    assert found.shape == (m, n)


REFUSALS: dict[str, tuple[Callable[[Tensors], Any], type[Exception], str]] = {
    "a bias besides": (
        lambda x: call(x, addend=x["addend"], bias=x["bias"]), ValueError,
        "grouped_mm: bias and addend are both given, at most one"),
    "a gate besides": (
        lambda x: call(x, addend=x["addend"], epilogue="swiglu_halves"), ValueError,
        "addend is given with epilogue swiglu_halves, but is only for products without a gate"),
    "its epilogue by name": (
        lambda x: call(x, addend=x["addend"], epilogue="add"), ValueError,
        "epilogue is add, must be gated or None; a bias or a matrix needs no epilogue"),
    "fewer rows": (lambda x: call(x, addend=x["addend"][:15]), NoKernelError,
        r"matrix addend has shape \[15, 32\], must have the result's shape \[16, 32\]"),
    "one row": (lambda x: call(x, addend=x["addend"][0]), NoKernelError,
        r"addend has shape \[32\], must have the result's shape \[16, 32\]"),
    "one row that counts for all": (
        lambda x: call(x, addend=x["addend"][:1].expand(M, N)), NoKernelError,
        "addend is not row-major, or its elements share memory"),
    "column-major": (lambda x: call(x, addend=x["addend"].T.contiguous().T), NoKernelError,
        "addend is not row-major"),
    "another type": (lambda x: call(x, addend=x["addend"].half()), NoKernelError,
        "addend is torch.float16, must be torch.bfloat16"),
    "a type that no kernel adds to": (
        lambda x: call(x, addend=x["addend"].float(), out_dtype=torch.float32), NoKernelError,
        "no kernel for grouped_mm/tn/bf16xbf16/fp32/fp32/add"),
    "another device": (lambda x: call(x, addend=x["addend"].to("meta")), (ValueError, TypeError),
        "meta"),
    "a derivative": (lambda x: call(x, addend=x["addend"].clone().requires_grad_()), RuntimeError,
        "requires grad"),
    "a negated view": (
        lambda x: call(x, addend=torch._neg_view(x["addend"])), ValueError, "negat"),
    "k of 0": (
        lambda x: call({**x, "a": x["a"][:, :0], "b": x["b"][:, :0]}, addend=x["addend"]),
        NoKernelError, "k is 0, so the result is the addend"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(made: Tensors, name: str) -> None:
    refused, kind, said = REFUSALS[name]
    with pytest.raises(kind, match=said):
        refused(made)


def test_operators_refuse_the_kernel_by_name(installed: BuiltBundle, made: Tensors) -> None:
    nvgemm_runtime.load_operators()
    operator = torch.ops.nvgemm_aot.grouped_mm
    id_ = id_of(installed, grouped(ADD))
    with pytest.raises(RuntimeError, match="adds a matrix to groups, which no operator supports"):
        operator(made["a"], made["b"], made["ends"], id_, bias=made["addend"])
