"""Recording the grouped products of `nvgemm_runtime.moe.experts` in compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor import config
from torch._inductor.exc import InductorError
from torch._inductor.utils import run_and_get_code

import expert_steps
from expert_kernels import build_kernels
from expert_steps import KEPT, Experts
from inductor_session import InductorSession
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import BIAS, Epilogue
from nvgemm_runtime.moe import kernels
from nvgemm_runtime.recording.recorder import Recorder

SIZES = Experts(count=4, rows=48, dim=64, hidden=32)


@pytest.fixture
def path(inductor: InductorSession, tmp_path: Path) -> Path:
    """Where this process records to."""
    inductor.monkeypatch.setattr(
        kernels, "_warned", {*kernels.WARNINGS}
    )  # no kernel serves experts here
    path = tmp_path / "out.yaml"
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(path))
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD_TARGET", "sm_90a")
    return path


@pytest.fixture
def no_fusion() -> Iterator[None]:
    """Inductor calls ATen for all operators, which records the same and compiles no C++."""
    settings = {"fallback_by_default": True} if hasattr(config, "fallback_by_default") else {}
    with config.patch(settings):
        yield


def counts(path: Path) -> dict[str, int]:
    recording = Recorder(path).read()
    assert not recording.undeclarable
    return {problem.key: count for problem, count in recording.problems.items()}


@pytest.mark.usefixtures("no_fusion")
@pytest.mark.parametrize(
    "biased",
    [pytest.param(False, id="plain"), pytest.param(True, id="biases", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kept", KEPT)
def test_a_training_step(inductor: InductorSession, path: Path, kept: str, biased: bool) -> None:
    check_training_step(path, kept=kept, biased=biased)


@pytest.mark.slow  # what is fused around the products is C++
def test_a_training_step_with_fusion(inductor: InductorSession, path: Path) -> None:
    check_training_step(path, kept="pair", biased=True)


def check_training_step(path: Path, *, kept: str, biased: bool) -> list[str]:
    """Check what a step records; its generated modules."""
    sizes = Experts(count=4, rows=48, dim=96, hidden=32, kept=kept, biased=biased)
    compiled = torch.compile(expert_steps.forward(sizes), fullgraph=True, dynamic=False)

    def step() -> None:
        out = compiled(*expert_steps.operands(sizes))
        out.backward(torch.randn_like(out))

    _, code = run_and_get_code(step)
    assert counts(path) == expert_steps.problems_of(sizes)
    return list(code)


@pytest.mark.usefixtures("no_fusion")
@pytest.mark.parametrize("kept", ["one", "pair"])
def test_products_that_kernels_with_a_gate_compute(
    inductor: InductorSession, path: Path, kernel_cache: Cache, tmp_path: Path, kept: str
) -> None:
    """A recording holds the products alone, as of experts that run without such kernels."""
    kernels: dict[str, list[Epilogue | None]] = {
        "tn": [None, BIAS, Epilogue.parse("swiglu_halves_kept")],
        "tt": [None, Epilogue.parse("swiglu_halves_gradient")],
    }
    inductor.use(build_kernels(kernels, (), tmp_path, kernel_cache))
    code = check_training_step(path, kept=kept, biased=kept == "pair")
    assert "nvgemm_moe.gate_gradient.default" in code[1]
    assert f"nvgemm_moe.{'paired' if kept == 'pair' else 'gated'}_rows.default" in code[0]


@pytest.mark.usefixtures("no_fusion")
def test_each_product_counts_as_often_as_graphs_have_it(
    inductor: InductorSession, path: Path
) -> None:
    run = expert_steps.forward(SIZES)
    given = expert_steps.operands(SIZES)

    def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return run(run(x, *weights), *weights)

    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            inductor.compile(layers, *given)
    assert counts(path) == {
        "grouped_mm/tn/bf16xbf16/fp32/bf16/g4m48n64k64": 4,
        "grouped_mm/tn/bf16xbf16/fp32/bf16/g4m48n64k32": 4,
    }


@pytest.mark.usefixtures("no_fusion")
@pytest.mark.parametrize(
    ("mark", "rows"),
    [(torch._dynamo.mark_dynamic, 48), (torch._dynamo.decorators.mark_unbacked, 8192)],
    ids=["an example", "Inductor's own example"],
)
def test_dynamic_rows_count_as_an_example(
    inductor: InductorSession, path: Path, mark: Any, rows: int
) -> None:
    x, *weights = expert_steps.operands(SIZES)
    x = x.detach()
    mark(x, 0)
    with torch.no_grad():
        inductor.compile(expert_steps.forward(SIZES), x, *weights, dynamic=None)
    assert counts(path) == {
        f"grouped_mm/tn/bf16xbf16/fp32/bf16/g4m{rows}n64k64": 1,
        f"grouped_mm/tn/bf16xbf16/fp32/bf16/g4m{rows}n64k32": 1,
    }


def test_a_recording_that_cannot_be_written_ends_the_compilation(
    inductor: InductorSession, path: Path
) -> None:
    path.write_text("not a recording")
    with (
        pytest.raises(InductorError, match=r"RecordError: .*not a recording"),
        torch.no_grad(),
    ):
        inductor.compile(expert_steps.forward(SIZES), *expert_steps.operands(SIZES))


def test_graphs_are_the_same_with_and_without_recording(
    inductor: InductorSession, path: Path
) -> None:
    given = expert_steps.operands(SIZES)
    with torch.no_grad():
        recorded = inductor.compile(expert_steps.forward(SIZES), *given)
        inductor.monkeypatch.delenv("NVGEMM_AOT_RECORD")
        torch._dynamo.reset()
        stock = inductor.compile(expert_steps.forward(SIZES), *given)
    assert counts(path)
    assert "torch.ops.nvgemm_moe.rows.default" in recorded.code[0]
    calls = [
        [line.split("=")[1] for line in code.splitlines() if "nvgemm_moe" in line and "=" in line]
        for code in (recorded.code[0], stock.code[0])
    ]
    assert calls[0] == calls[1]
    assert torch.equal(recorded.result, stock.result)
