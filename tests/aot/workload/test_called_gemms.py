"""What `GemmCalls` sees of a program: each matrix product with its layout, and the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import expert_steps
from expert_steps import KEPT, Experts
from nvgemm_aot.workload.called_gemms import GemmCalls
from nvgemm_runtime.moe import kernels, routed_experts

Tensor = torch.Tensor

_KINDS: dict[str, Callable[[], Any]] = {
    "real": contextlib.nullcontext,
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
}


@pytest.fixture(params=_KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    """Makes tensors of one kind within it."""
    with _KINDS[request.param]():
        yield request.param


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def count(program: Callable[[], object]) -> tuple[dict[str, int], dict[str, int]]:
    with GemmCalls() as calls:
        program()
    return {problem.key: n for problem, n in calls.problems.items()}, dict(calls.undeclarable)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    ("layout", "a", "b"),
    [
        ("tt", lambda: matrix(16, 64), lambda: matrix(64, 32)),
        ("tn", lambda: matrix(16, 64), lambda: matrix(32, 64).t()),
        ("nt", lambda: matrix(64, 16).t(), lambda: matrix(64, 32)),
        ("nn", lambda: matrix(64, 16).t(), lambda: matrix(32, 64).t()),
        ("tt", lambda: matrix(16, 128)[:, 64:], lambda: matrix(64, 96)[:, 32:64]),
    ],
)
def test_views_and_transposed_operands_have_their_layout(
    layout: str, a: Callable[[], Tensor], b: Callable[[], Tensor]
) -> None:
    problems, others = count(lambda: torch.mm(a(), b()))
    assert problems == {f"mm/{layout}/bf16xbf16/fp32/bf16/m16n32k64": 1}
    assert not others


@pytest.mark.usefixtures("kind")
def test_a_linear_layer_forwards_and_backwards() -> None:
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x = matrix(2, 8, 64).requires_grad_()
    problems, others = count(lambda: layer(x).backward(matrix(2, 8, 32)))
    assert problems == {
        "mm/tn/bf16xbf16/fp32/bf16/m16n32k64": 1,
        "mm/tt/bf16xbf16/fp32/bf16/m16n64k32": 1,
        "mm/nt/bf16xbf16/fp32/bf16/m32n64k16": 1,
    }
    assert not others


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_composite_operators_come_down_to_products_in_every_mode(mode: Callable[[], Any]) -> None:
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x = matrix(2, 16, 64)

    def program() -> None:
        with mode():
            functional.linear(x, layer.weight)
            torch.matmul(x, x.mT)
            torch.einsum("bik,bjk->bij", x, x)

    problems, others = count(program)
    assert problems == {
        "mm/tn/bf16xbf16/fp32/bf16/m32n32k64": 1,
        "bmm/tn/bf16xbf16/fp32/bf16/b2m16n16k64": 2,
    }
    assert not others


@pytest.mark.usefixtures("kind")
def test_a_row_counts_as_row_major_and_a_wider_result_is_told_apart() -> None:
    a, b = matrix(1, 64), matrix(32, 64).t()
    problems, _ = count(lambda: torch.mm(a, b, out=matrix(1, 32)))
    assert problems == {"mm/tn/bf16xbf16/fp32/bf16/m1n32k64": 1}


@pytest.mark.parametrize("kind", ["meta", "fake"], indirect=True)
def test_a_result_of_another_type(kind: str) -> None:
    def program() -> None:
        torch.mm(matrix(16, 64), matrix(64, 32), out_dtype=torch.float32)
        torch.bmm(matrix(2, 16, 64), matrix(2, 64, 32), out_dtype=torch.float32)

    problems, _ = count(program)
    assert set(problems) == {
        "mm/tt/bf16xbf16/fp32/fp32/m16n32k64",
        "bmm/tt/bf16xbf16/fp32/fp32/b2m16n32k64",
    }


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_a_sum_that_no_kernel_computes_counts_as_its_product(arch: str) -> None:
    a, b = matrix(16, 64), matrix(32, 64).t()
    with GemmCalls(arch) as calls:
        torch.addmm(matrix(32), a, b)
        torch.addmm(matrix(16, 32), a, b)
        torch.addmm(matrix(16, 1), a, b)
        torch.baddbmm(matrix(2, 1, 32), matrix(2, 16, 64), matrix(2, 32, 64).mT)
    assert {problem.key: count for problem, count in calls.problems.items()} == {
        "mm/tn/bf16xbf16/fp32/bf16/bias/m16n32k64": 1,
        "mm/tn/bf16xbf16/fp32/bf16/add/m16n32k64": 1,
        "mm/tn/bf16xbf16/fp32/fp32/m16n32k64": 1,
        "bmm/tn/bf16xbf16/fp32/fp32/b2m16n32k64": 1,
    }
    assert not calls.undeclarable


def test_what_an_architecture_has_no_kernel_for_is_kept_in_words() -> None:
    a, b = matrix(32, 64).to(torch.int8), matrix(64, 32).to(torch.int8)
    with GemmCalls("sm_90a") as calls:
        torch._int_mm(a, b)
    assert not calls.problems
    (said,) = calls.undeclarable
    assert said.endswith("kernels for sm_90a multiply int8 in layout tn alone (here tt)")


def test_what_is_added_or_scaled_is_part_of_a_problem() -> None:
    def program() -> None:
        a, b = matrix(16, 64), matrix(32, 64).t()
        torch.addmm(matrix(32), a, b)
        torch.addmm(matrix(16, 32), a, b)
        torch.baddbmm(matrix(3, 16, 32), matrix(3, 16, 64), matrix(3, 64, 32))
        one = torch.ones((), dtype=torch.float32)
        fp8 = torch.float8_e4m3fn
        torch._scaled_mm(a.to(fp8), b.to(fp8), one, one, bias=matrix(32), out_dtype=torch.bfloat16)
        ends = torch.tensor([8, 16], dtype=torch.int32)
        functional.grouped_mm(a, matrix(2, 32, 64).mT, offs=ends)

    with FakeTensorMode():
        problems, others = count(program)
    assert not others
    assert set(problems) == {
        "mm/tn/bf16xbf16/fp32/bf16/bias/m16n32k64",
        "mm/tn/bf16xbf16/fp32/bf16/add/m16n32k64",
        "bmm/tt/bf16xbf16/fp32/bf16/add/b3m16n32k64",
        "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor/bias/m16n32k64",
        "grouped_mm/tn/bf16xbf16/fp32/bf16/g2m16n32k64",
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            lambda: torch.addmm(matrix(32), matrix(16, 64), matrix(64, 32), beta=2),
            "addmm of bf16[16, 64] and bf16[64, 32] into bf16[16, 32]: beta is 2, must be 1",
        ),
        (
            lambda: torch.mm(*(matrix(64, 64, dtype=torch.float32) for _ in range(2))),
            "mm of fp32[64, 64] and fp32[64, 64] into fp32[64, 64]: "
            "fp32 is not multiplied by any operator",
        ),
        (
            lambda: torch.mm(matrix(16, 36), matrix(36, 32)),
            "mm of bf16[16, 36] and bf16[36, 32] into bf16[16, 32]: rows or columns are aligned "
            "to 8 bytes, kernels need 16",
        ),
        (
            lambda: torch.mm(matrix(16, 1).expand(16, 64), matrix(64, 32)),
            "mm of bf16[16, 64] and bf16[64, 32] into bf16[16, 32]: "
            "a is contiguous along neither dimension",
        ),
        (
            lambda: torch.baddbmm(matrix(1, 16, 1), matrix(1, 16, 64), matrix(1, 64, 32)),
            "baddbmm of bf16[1, 16, 64] and bf16[1, 64, 32] into bf16[1, 16, 32]: "
            "addend has shape [1, 16, 1]",
        ),
        (
            lambda: torch.addbmm(matrix(16, 32), matrix(2, 16, 64), matrix(2, 64, 32)),
            "addbmm of bf16[2, 16, 64] and bf16[2, 64, 32] into bf16[16, 32]: "
            "no bundled kernel sums over a batch",
        ),
        (
            lambda: functional.grouped_mm(
                matrix(64, 16).t(), matrix(2, 64, 32), offs=torch.tensor([8, 16], dtype=torch.int32)
            ),
            "_grouped_mm of bf16[16, 64] and bf16[2, 64, 32] into bf16[16, 32]: "
            "grouped_mm of bf16 has layout tn or tt alone (here nt)",
        ),
    ],
)
def test_what_no_manifest_declares_is_kept_in_words(
    program: Callable[[], object], said: str
) -> None:
    with FakeTensorMode():
        problems, others = count(program)
    assert not problems
    ((text, times),) = others.items()
    assert text.startswith(said)
    assert times == 1


def test_calls_add_up_and_others_are_no_gemms() -> None:
    a, b = matrix(16, 64), matrix(64, 32)

    def program() -> None:
        for _ in range(3):
            torch.mm(a, b).relu().sum()
        a @ b[:, 0]

    assert count(program) == ({"mm/tt/bf16xbf16/fp32/bf16/m16n32k64": 3}, {})


def test_what_a_tensor_is_made_of_counts_and_not_the_whole() -> None:
    parts = TwoTensor(matrix(16, 64), matrix(16, 64))
    problems, _ = count(lambda: torch.mm(parts, parts.t()))
    assert problems == {"mm/tn/bf16xbf16/fp32/bf16/m16n16k64": 2}


@pytest.mark.parametrize("kind", ["real", "fake"], indirect=True)  # autocast knows no meta
@pytest.mark.parametrize("kept", KEPT)
def test_experts_forward_and_backward(
    kind: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No kernel serves experts here.
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})
    sizes = Experts(count=4, rows=48, dim=96, hidden=32, kept=kept, biased=True)
    problems, others = count(lambda: expert_steps.step(sizes))
    assert problems == expert_steps.problems_of(sizes)
    assert not others


@pytest.mark.parametrize("kind", ["real", "fake"], indirect=True)
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
def test_sums_of_tokens_rows(weighed: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what experts give each token, and in the backward of the gradients of what goes into them.

    With weights, the backward also gives rows theirs, for the gradient of the up projection.
    """
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})
    x, up, down = (matrix(*shape).requires_grad_() for shape in ((6, 16), (4, 64, 16), (4, 16, 32)))
    chosen = torch.ones((6, 2), dtype=torch.int32)
    scores = torch.ones((6, 2)).requires_grad_() if weighed else None

    def step() -> None:
        out = routed_experts(x, up, down, chosen, scores)
        out.backward(torch.ones_like(out))

    problems, others = count(step)
    found = {key: times for key, times in problems.items() if key.startswith("gathered_mm/")}
    rows = {"gathered_mm/tt/fp32xbf16/fp32/bf16/m12n16k1": 1} if weighed else {}
    assert found == {"gathered_mm/tt/fp32xbf16/fp32/bf16/m6n16k2": 2, **rows}
    assert not others
