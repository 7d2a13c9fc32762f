"""Groups of rows: any distribution, ends that are wrong, both layouts, eager and compiled; gates
and biases of groups. The gates' forms for training are in `test_grouped_training`.

Needs the wheel of grouped.yaml, whose kernels `test_kernels` looks at as at all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, exact_arguments, poisoned, random_arguments
from gemm_reference import assert_close, assert_exact, reference
from installed import installed_kernels, launch
from torch._inductor.utils import fresh_cache
from user_program import ATEN_GEMMS, slow_down_aten

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.epilogues import (
    ADD,
    ALL_EPILOGUES,
    BIAS,
    Addend,
    Gate,
    GateForm,
    WeightOrder,
    find_gated,
)
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.types import ScaleRecipe

DEVICE = "cuda"
INSTALLED = [kernel for _, kernel in installed_kernels() if kernel.signature.op is Op.GROUPED_MM]
KERNELS = [one for one in INSTALLED if one.signature.form in (None, GateForm.JOINED)]


def ids(kernels: list[Kernel]) -> list[str]:
    return [f"{kernel.id[:12]}-{kernel.signature.key}" for kernel in kernels]


each = pytest.mark.parametrize("kernel", KERNELS, ids=ids(KERNELS))

COUNTS: dict[str, tuple[int, ...]] = {
    "one row each": (1,) * 40,
    "all rows in the first": (777, 0, 0, 0, 0),
    "all rows in the last": (0, 0, 0, 0, 777),
    "all rows in the middle": (0, 0, 257, 0, 0),
    "odd": (1, 3, 127, 129, 0, 255, 257, 5, 63, 65),
    "whole tiles": (64, 128, 256, 0, 192, 384),
    "one group": (300,),
    "more groups than lanes of a warp": tuple((7 * i) % 11 for i in range(100)),
    "31 empty ones, then one of rows": (*(0,) * 31, 9),
    "62 empty ones, then one of rows": (*(0,) * 62, 9, 0),
    "some rows in no group": (100, 0, 28),
}
"""Rows of each group. The scheduler counts the tiles of 31 groups at a time."""

UNGROUPED_ROWS = {"some rows in no group": 72}
"""Rows of A behind the last group, which nothing computes."""


K = 208
"""Not whole tiles; rows of fp8 lie at multiples of 16 bytes."""


def columns_of(signature: Signature) -> int:
    """Columns of B with which neither they nor the result's fill whole tiles."""
    return 656 if signature.is_gated else 328


def arguments_for(kernel: Kernel, name: str) -> Arguments:
    counts, rest = COUNTS[name], UNGROUPED_ROWS.get(name, 0)
    columns = columns_of(kernel.signature)
    problem = problem_of(kernel.signature, sum(counts) + rest, columns, K, count=len(counts))
    arguments = exact_arguments(problem)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    arguments.tensors[Role.OFFSETS] = ends.to(DEVICE)
    return arguments


def assert_right(out: torch.Tensor, arguments: Arguments) -> None:
    check = assert_close if arguments.problem.signature.is_gated else assert_exact
    check(out, arguments)


@each
@pytest.mark.parametrize("name", [name for name in COUNTS if name not in UNGROUPED_ROWS])
def test_any_distribution_of_rows_is_right(kernel: Kernel, name: str) -> None:
    """Sums are exact, and so is all but a gate. Each group has a bias of its own, if any."""
    arguments = arguments_for(kernel, name)
    assert_right(launch(kernel, arguments), arguments)


@each
@pytest.mark.parametrize("name", UNGROUPED_ROWS)
def test_rows_of_no_group_are_left_as_they_are(kernel: Kernel, name: str) -> None:
    arguments = arguments_for(kernel, name)
    rest = UNGROUPED_ROWS[name]
    left = arguments.out[-rest:].view(torch.uint8)
    before = left.clone()
    out = launch(kernel, arguments)
    assert torch.equal(left, before)
    assert out[:-rest].isfinite().all()


WRONG = {
    "falling": (100, 3, 70, 128),
    "all falling": (128, 90, 60, 0),
    "past the end": (10, 64, 4000, 1_000_000_000),
    "all past the end": (2**31 - 1,) * 4,
    "negative": (-5, 20, -(2**31), 128),
}


@each
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ends_write_nothing_outside_the_result(kernel: Kernel, name: str) -> None:
    """What the result holds is undefined; run it under compute-sanitizer for what is read."""
    columns = columns_of(kernel.signature)
    arguments = exact_arguments(problem_of(kernel.signature, 128, columns, K, count=4))
    arguments.tensors[Role.OFFSETS] = torch.tensor(WRONG[name], dtype=torch.int32, device=DEVICE)
    frame = poisoned((128 + 2 * 512, 328), kernel.signature.out)
    before = frame.clone()
    arguments.tensors[Role.OUT] = frame[512:-512]
    launch(kernel, arguments)
    torch.cuda.synchronize()
    frame[512:-512] = before[512:-512]
    assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Compile from nothing with a slow ATen; where the code goes."""
    from torch._inductor import config
    from torch._inductor.kernel import bmm, mm, mm_grouped  # noqa: F401  they name ATen's functions
    from torch._inductor.select_algorithm import extern_kernels

    torch._dynamo.reset()
    monkeypatch.setenv("NVGEMM_AOT_EXPLAIN", str(tmp_path / "events"))
    before = {name: getattr(extern_kernels, name) for name in ATEN_GEMMS}
    slow_down_aten(DEVICE)
    (tmp_path / "inductor").mkdir()
    with (
        fresh_cache(dir=str(tmp_path / "inductor"), delete=False),
        config.patch(max_autotune_gemm_backends="ATEN"),
    ):
        yield tmp_path
    for name, function in before.items():
        setattr(extern_kernels, name, function)
    torch._dynamo.reset()


def forward(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=ends)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tn": lambda b: b.mT,
    "tt": lambda b: b.mT.contiguous(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_products_of_groups_run_a_bundled_kernel(code: Path, layout: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(1024, 512, device=DEVICE, dtype=torch.bfloat16)
    b = LAYOUTS[layout](torch.randn(8, 768, 512, device=DEVICE, dtype=torch.bfloat16))
    counts = torch.tensor([0, 1, 333, 0, 400, 90, 200, 0])
    ends = counts.cumsum(0).to(torch.int32).to(DEVICE)
    compiled = torch.compile(forward, fullgraph=True, options={"max_autotune_gemm": True})
    with torch.no_grad():
        compiled(a, b, ends)
        result = compiled(a, b, ends)
    begin = 0
    for group, end in enumerate(ends.tolist()):
        exact = a[begin:end].float() @ b[group].float()
        torch.testing.assert_close(result[begin:end].float(), exact, rtol=2**-7, atol=0.5)
        begin = end
    events = [json.loads(line) for line in (code / "events").read_text().splitlines()]
    (met,) = [event for event in events if event["event"] == "met"]
    assert met["gemm"].startswith(f"grouped_mm/{layout}/bf16xbf16/fp32/bf16/")
    texts = [path.read_text() for path in (code / "inductor").glob("**/*.py")]
    assert any(re.search(r"\bnvgemm_\w+_[0-9a-f]{12}\(", text) for text in texts)


def scaled_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    return torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def test_compiled_scaled_groups_run_a_bundled_kernel(code: Path) -> None:
    torch.manual_seed(0)
    a = torch.randn(1024, 512, device=DEVICE).to(torch.float8_e4m3fn)
    b = torch.randn(8, 768, 512, device=DEVICE).to(torch.float8_e4m3fn).mT
    scales = torch.rand(1024, device=DEVICE) + 0.5, torch.rand(8, 768, device=DEVICE) + 0.5
    counts = torch.tensor([0, 16, 320, 0, 400, 96, 192, 0])
    ends = counts.cumsum(0).to(torch.int32).to(DEVICE)
    compiled = torch.compile(scaled_forward, fullgraph=True, options={"max_autotune_gemm": True})
    with torch.no_grad():
        compiled(a, b, *scales, ends)
        result = compiled(a, b, *scales, ends)
    begin = 0
    for group, end in enumerate(ends.tolist()):
        exact = a[begin:end].float() @ b[group].float()
        exact = exact * scales[0][begin:end, None] * scales[1][group]
        torch.testing.assert_close(result[begin:end].float(), exact, rtol=2**-6, atol=1.0)
        begin = end
    events = [json.loads(line) for line in (code / "events").read_text().splitlines()]
    (met,) = [event for event in events if event["event"] == "met"]
    assert met["gemm"].startswith("grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/")
    texts = [path.read_text() for path in (code / "inductor").glob("**/*.py")]
    assert any(re.search(r"\bnvgemm_\w+_[0-9a-f]{12}\(", text) for text in texts)


def test_both_layouts_and_every_epilogue_are_installed() -> None:
    assert {kernel.signature.layout.value for kernel in KERNELS} == {"tn", "tt"}
    gated = {one for one in ALL_EPILOGUES if one.gate is not None}
    assert {kernel.signature.epilogue for kernel in INSTALLED} == {
        None,
        BIAS,
        ADD,
        *gated,
    }
    of_fp8 = [kernel.signature for kernel in KERNELS if kernel.signature.a.is_fp8]
    assert {one.scales for one in of_fp8} == {None, ScaleRecipe.FP32_ROW}


GATED = [kernel for kernel in KERNELS if kernel.signature.is_gated]
BIASED = [
    kernel
    for kernel in INSTALLED
    if kernel.signature.epilogue is not None and kernel.signature.epilogue.addend is Addend.ROW
]


@pytest.mark.parametrize("kernel", GATED, ids=ids(GATED))
@pytest.mark.parametrize("half", [8, 24, 1000, 1432])
def test_gates_that_end_within_a_tile_are_right(kernel: Kernel, half: int) -> None:
    """A tile past the last gate must not read the first ups as gates, nor the next group's."""
    problem = problem_of(kernel.signature, 330, 2 * half, 136, count=5)
    arguments = random_arguments(problem)
    assert_close(launch(kernel, arguments), arguments)


@pytest.mark.parametrize("gate", Gate)
def test_both_orders_of_groups_give_the_same_result(gate: Gate) -> None:
    """Sums are exact, so that they do not depend on the tile."""
    results = []
    for order in WeightOrder:
        key = f"grouped_mm/tn/bf16xbf16/fp32/bf16/{find_gated(gate, order).name}"
        torch.manual_seed(3)
        arguments = exact_arguments(problem_of(Signature.parse(key), 300, 2080, 512, count=7))
        if order is WeightOrder.INTERLEAVED:
            for role in (Role.B, Role.ADDEND):
                if role in arguments.tensors:
                    gates, ups = arguments.tensors[role].chunk(2, -1)
                    woven = torch.stack([gates, ups], -1).flatten(-2)
                    arguments.tensors[role] = woven.mT.contiguous().mT if role is Role.B else woven
        some = [kernel for kernel in GATED if kernel.signature.key == key]
        assert some
        results += [launch(kernel, arguments).clone() for kernel in some]
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("kernel", BIASED, ids=ids(BIASED))
def test_a_nan_in_the_bias_of_a_group_stays_in_it(kernel: Kernel) -> None:
    columns = columns_of(kernel.signature)
    arguments = exact_arguments(problem_of(kernel.signature, 300, columns, K, count=4))
    ends = torch.tensor((90, 91, 91, 300), dtype=torch.int32, device=DEVICE)
    arguments.tensors[Role.OFFSETS] = ends
    arguments.tensors[Role.ADDEND][1] = float("nan")  # of one row
    arguments.tensors[Role.ADDEND][2] = float("nan")  # of no row
    out = launch(kernel, arguments)
    assert out[90].isnan().all()
    assert_close(out, arguments)


@pytest.mark.parametrize("kernel", BIASED, ids=ids(BIASED))
def test_a_bias_may_lie_in_a_wider_one(kernel: Kernel) -> None:
    """As where the biases of all experts of a model are one tensor."""
    columns = columns_of(kernel.signature)
    arguments = exact_arguments(problem_of(kernel.signature, 300, columns, K, count=4))
    bias = arguments.tensors[Role.ADDEND]
    wide = torch.full((4, 2 * columns), float("nan"), dtype=bias.dtype, device=DEVICE)
    wide[:, :columns] = bias
    arguments.tensors[Role.ADDEND] = wide[:, :columns]
    assert_right(launch(kernel, arguments), arguments)


ADDED = [kernel for kernel in INSTALLED if kernel.signature.epilogue is ADD]


@pytest.mark.parametrize("kernel", ADDED, ids=ids(ADDED))
def test_each_row_has_its_own_row_added(kernel: Kernel) -> None:
    """A tile reads past the end of its group: what it reads there goes into no other row."""
    columns = columns_of(kernel.signature)
    arguments = exact_arguments(problem_of(kernel.signature, 310, columns, K, count=4))
    ends = torch.tensor((90, 91, 91, 300), dtype=torch.int32, device=DEVICE)
    arguments.tensors[Role.OFFSETS] = ends
    addend = arguments.tensors[Role.ADDEND]
    wide = torch.full((310, 2 * columns), float("nan"), dtype=addend.dtype, device=DEVICE)
    wide[:, :columns] = addend
    wide[(90, 205), :] = float("nan")  # of the only row of its group, and within another
    wide[300:, :] = float("nan")  # of no group
    arguments.tensors[Role.ADDEND] = wide[:, :columns]
    out = arguments.out.fill_(7)
    before = wide.clone()
    launch(kernel, arguments)
    assert (out[300:] == 7).all()
    assert out[:300].isnan().any(1).nonzero().flatten().tolist() == [90, 205]
    assert torch.equal(wide.nan_to_num(9), before.nan_to_num(9))
    some = [place for place in range(300) if place not in (90, 205)]
    wanted = reference(arguments)[some]
    assert torch.equal(out[some].double(), wanted.to(out.dtype).double())


def test_a_captured_launch_with_a_gate_reads_offsets_anew() -> None:
    kernel = GATED[0]
    arguments = arguments_for(kernel, "odd")
    launch(kernel, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kernel, arguments)
    ends = arguments.tensors[Role.OFFSETS]
    ends.copy_(torch.linspace(0, int(ends[-1]), len(ends), device=DEVICE).int())
    arguments.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(arguments.out, arguments)
