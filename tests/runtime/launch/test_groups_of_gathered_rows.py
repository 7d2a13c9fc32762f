"""`gathered_grouped_mm` by bundled kernels for the CPU: values, epilogues, refusals."""

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
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.settings import DEBUG_VARIABLE

Tensors = dict[str, torch.Tensor]
TOKENS, M, N, K, ENDS = 11, 16, 32, 64, (0, 5, 6, 14)
"""Sizes, and ends of groups: an empty one, one of one row; two rows are of none."""


@pytest.fixture
def made(installed: BuiltBundle) -> Tensors:
    torch.manual_seed(0)
    shapes = {"a": (TOKENS, K), "w": (len(ENDS), N, K), "bias": (len(ENDS), N), "gates": (M, N)}
    made = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    rows = torch.randint(TOKENS, (M,), dtype=torch.int32)
    return {**made, "b": made["w"].mT, "ends": torch.tensor(ENDS, dtype=torch.int32), "rows": rows}


def call(made: Tensors, **given: Any) -> torch.Tensor:
    return nvgemm_runtime.gathered_grouped_mm(
        made["a"], made["b"], made["ends"], made["rows"], **given
    )


@pytest.mark.parametrize(
    ("epilogue", "others"),
    [
        (None, ()),
        (None, ("bias",)),
        ("swiglu_halves", ()),
        ("swiglu_oai_interleaved_kept", ("bias",)),
        ("swiglu_halves_ups", ("gates",)),
    ],
)
def test_it_is_the_product_of_the_rows_that_are_named(
    made: Tensors, epilogue: str | None, others: tuple[str, ...]
) -> None:
    given = {"epilogue": epilogue, **{name: made[name] for name in others}}
    found = call(made, **given)
    taken = made["a"][made["rows"].long()]
    wanted = nvgemm_runtime.grouped_mm(taken, made["b"], made["ends"], **given)
    assert torch.equal(found[: ENDS[-1]], wanted[: ENDS[-1]])
    out = torch.full_like(found, 7)
    assert call(made, out=out, **given) is out
    assert (out[ENDS[-1] :] == 7).all()


def test_a_kernel_is_found_and_may_be_named(installed: BuiltBundle, made: Tensors) -> None:
    served = signature(
        "tn",
        op=Op.GATHERED_GROUPED_MM,
        operand=DType.BF16,
        epilogue=Epilogue.parse("swiglu_halves"),
    )
    extras = ExtraOperands(
        offsets=made["ends"], rows=made["rows"], gated=Epilogue.parse("swiglu_halves")
    )
    out = torch.empty(M, N // 2).bfloat16()
    chosen = nvgemm_runtime.choose(made["a"], made["b"], out, extras=extras)
    assert chosen.kernel.signature == served
    explained = nvgemm_runtime.explain(made["a"], made["b"], extras=extras)
    assert explained.match is not None
    assert explained.request.problem.m == M
    wanted = call(made, epilogue="swiglu_halves")
    assert torch.equal(call(made, kernel=id_of(installed, served))[: ENDS[-1]], wanted[: ENDS[-1]])
    with pytest.raises(ValueError, match="computes gathered_grouped_mm/"):
        nvgemm_runtime.grouped_mm(made["gates"], made["b"][:, :N], made["ends"], kernel=chosen)


@pytest.mark.parametrize(("tokens", "m", "groups"), [(0, M, 4), (TOKENS, 0, 4), (TOKENS, M, 0)])
def test_zero_sizes(installed: BuiltBundle, tokens: int, m: int, groups: int) -> None:
    a, b = torch.ones(tokens, K).bfloat16(), torch.ones(groups, N, K).bfloat16().mT
    ends, rows = torch.zeros(groups, dtype=torch.int32), torch.zeros(m, dtype=torch.int32)
    found = nvgemm_runtime.gathered_grouped_mm(a, b, ends, rows)
    assert found.shape == (m, N)
    assert not found.any()


@pytest.mark.parametrize(("value", "is_taken"), [(-1, True), (TOKENS, True), (TOKENS, False)])
def test_rows_are_checked_where_the_user_debugs(
    made: Tensors, value: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those past the last end are not."""
    place = 9 if is_taken else 15
    wanted = call(made)
    made["rows"][place] = value
    found = call(made)
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    others = [row for row in range(ENDS[-1]) if row != place]
    assert torch.equal(found[others], wanted[others])
    if not is_taken:
        assert torch.equal(call(made)[others], wanted[others])
        return
    said = rf"rows\[9\] is {value}, must be in 0\.\.10: a has 11 rows"
    with pytest.raises(ValueError, match=said):
        call(made)


REFUSALS: dict[str, tuple[Callable[[Tensors], Any], type[Exception], str]] = {
    "fewer rows than out": (
        lambda x: call(x, out=torch.empty(M + 1, N).bfloat16()), ValueError,
        r"gathered_grouped_mm: out has shape \[17, 32\], must have \[16, 32\]"),
    "rows in two dimensions": (
        lambda x: call({**x, "rows": x["rows"][:, None]}), ValueError,
        "gathered_grouped_mm: rows are missing or not one-dimensional"),
    "rows of 64 bits": (
        lambda x: call({**x, "rows": x["rows"].long()}), NoKernelError,
        r"rows are torch.int64, must be torch.int32; call .int\(\) on them"),
    "rows with gaps": (
        lambda x: call({**x, "rows": torch.zeros(2 * M, dtype=torch.int32)[::2]}), NoKernelError,
        r"rows are not contiguous; call .contiguous\(\) on them"),
    "rows on another device": (
        lambda x: call({**x, "rows": x["rows"].to("meta")}), ValueError,
        r"tensors are on two devices \(cpu and meta\)"),
    "fewer ends": (
        lambda x: call({**x, "ends": x["ends"][:3]}), ValueError, r"must have \[4\]"),
    "another k": (
        lambda x: call({**x, "a": x["a"][:, :32]}), ValueError, "do not multiply"),
    "a gradient": (
        lambda x: call(x, epilogue="swiglu_halves_gradient"), NoKernelError,
        "swiglu_halves_gradient needs product"),
    "a bias for swiglu": (
        lambda x: call(x, bias=x["bias"], epilogue="swiglu_halves"), NoKernelError,
        "swiglu_halves takes no bias"),
    "gates of fewer rows": (
        lambda x: call(x, gates=x["gates"][:8], epilogue="swiglu_halves_ups"), NoKernelError,
        r"reads gates of shape \[8, 32\], must have \[16, 32\]"),
    "a bias and gates": (
        lambda x: call(x, bias=x["bias"], gates=x["gates"], epilogue="swiglu_halves_ups"),
        ValueError, "gathered_grouped_mm: bias is given with epilogue swiglu_halves_ups"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(made: Tensors, case: str) -> None:
    run, kind, said = REFUSALS[case]
    with pytest.raises(kind, match=said):
        run(made)
