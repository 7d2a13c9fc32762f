from __future__ import annotations

import pytest
import torch

from nvgemm_runtime.gemm.operand_checks import check_shapes
from nvgemm_runtime.gemm.operands import requests
from nvgemm_runtime.gemm.problem import Op


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(4), torch.zeros(4, 4), r"rank 2 \(got 1 and 2\)"),
        (torch.zeros(2, 4, 4), torch.zeros(2, 4, 4), r"rank 2 \(got 3 and 3\)"),
        (torch.zeros(4, 5), torch.zeros(4, 5), r"\[4, 5\] and \[4, 5\] do not multiply"),
        (torch.zeros(4, 4), torch.zeros(4, 4, device="meta"), r"two devices \(cpu and meta\)"),
    ],
)
def test_operands_that_do_not_multiply_are_refused(
    a: torch.Tensor, b: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        requests(Op.MM, a, b)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(4, 5), r"out has shape \[4, 5\], must have \[4, 4\]"),
        (torch.zeros(4), r"out has shape \[4\]"),
        (torch.zeros(4, 4, device="meta"), "out is on meta, the operands on cpu"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shapes(Op.MM, torch.zeros(4, 4), torch.zeros(4, 4), out)


def test_batches_must_agree() -> None:
    with pytest.raises(ValueError, match="do not multiply"):
        requests(Op.BMM, torch.zeros(2, 4, 4), torch.zeros(3, 4, 4))
