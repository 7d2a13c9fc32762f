"""What `nvgemm_runtime.dispatch_table` says of a GEMM at every m."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cpu_provider
import nvgemm_runtime
import tuning_bench
from inductor_session import InductorSession
from measured_bundles import ATEN, write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.settings import REPEATED_VARIABLE

SQUARE, WIDE, ONE = "Cpu_16x16", "Cpu_8x32", "Cpu_1x1"

TIMES = {
    8: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    16: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    32: {SQUARE: 500, WIDE: 500, ONE: 600, ATEN: 200},
}


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    return tuning_bench.build(problems, tmp_path_factory.mktemp("built"), kernel_cache)


A, B = torch.randn(3, 64), torch.randn(64, 32)


def operators(table: nvgemm_runtime.DispatchedSizes) -> list[tuple[int, int | None, str]]:
    return [
        (one.first, one.last, "" if one.kernel is None else one.kernel.kernel.operator)
        for one in table.segments
    ]


def test_sizes_and_winners(inductor: InductorSession, built: Path, tmp_path: Path) -> None:
    inductor.use(write_measured(built, tmp_path / "m" / "measured.nvgemm", TIMES))
    table = nvgemm_runtime.dispatch_table(A, B)
    assert operators(table) == [(1, 7, ""), (8, 16, WIDE), (17, None, "")]
    lines = str(table).splitlines()
    assert lines[0] == "mm/tt/fp32xfp32/fp32/fp32, n 32, k 64, on cpu"
    assert lines[1] == "  m 1 to 7: ATen"
    assert lines[2].startswith("  m 8 to 16: ")
    assert lines[2].endswith(f" {WIDE}")
    assert lines[3] == "  m 17 and more: ATen"
    assert [line.split(":")[0] for line in lines[4:]] == [
        "  measured at m 8", "  measured at m 16", "  measured at m 32",
    ]  # fmt: skip
    assert f"{WIDE} 0.3 us" in lines[4]
    assert lines[4].endswith(", ATen 1.0 us")


def test_a_gain_that_is_too_small_is_said(
    inductor: InductorSession, built: Path, tmp_path: Path
) -> None:
    times = {**TIMES, 8: {SQUARE: 995, WIDE: 1200, ONE: 1200, ATEN: 1000}}
    inductor.use(write_measured(built, tmp_path / "m" / "measured.nvgemm", times))
    table = nvgemm_runtime.dispatch_table(A, B)
    assert operators(table)[0] == (1, 15, "")
    assert [line.endswith("does not count)") for line in str(table).splitlines()[4:]] == [
        True, False, False,
    ]  # fmt: skip


def test_what_is_not_confirmed_is_said_and_can_be_asked_for(
    inductor: InductorSession, built: Path, tmp_path: Path
) -> None:
    once = write_measured(built, tmp_path / "m" / "once.nvgemm", TIMES, confirmed_by=())
    inductor.use(once)
    table = nvgemm_runtime.dispatch_table(A, B)
    assert operators(table) == [(1, None, "")]
    assert (
        "  not used at m 8: measured once, and neither repeated nor confirmed by another GPU"
        in str(table)
    )
    assert len(nvgemm_runtime.dispatch_table(A, B, measured_once=True).segments) == 3


def test_what_one_gpu_repeated_counts_by_its_gain_and_a_setting(
    inductor: InductorSession, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {**TIMES, 8: {SQUARE: 960, WIDE: 1200, ONE: 1200, ATEN: 1000}}
    path = tmp_path / "m" / "repeated.nvgemm"
    inductor.use(write_measured(built, path, times, confirmed_by=(), repeated=300))
    table = nvgemm_runtime.dispatch_table(A, B)
    assert operators(table)[0] == (1, 15, "")
    assert "(a gain of less than 8% does not count)" in str(table)
    monkeypatch.setenv(REPEATED_VARIABLE, "1")
    assert operators(nvgemm_runtime.dispatch_table(A, B))[:2] == [(1, 7, ""), (8, 8, SQUARE)]


def test_what_nobody_declared(inductor: InductorSession, built: Path, tmp_path: Path) -> None:
    inductor.use(write_measured(built, tmp_path / "m" / "measured.nvgemm", TIMES))
    table = nvgemm_runtime.dispatch_table(A, torch.randn(64, 48))
    assert operators(table) == [(1, None, "")]
    assert "no bundle that serves this device declares this n and k" in str(table)
    inductor.use()
    assert operators(nvgemm_runtime.dispatch_table(A, B)) == [(1, None, "")]


def test_operands_that_no_kernel_could_take_are_refused(inductor: InductorSession) -> None:
    with pytest.raises(ValueError, match="do not multiply"):
        nvgemm_runtime.dispatch_table(A, torch.randn(60, 32))
    with pytest.raises(NoKernelError):
        nvgemm_runtime.dispatch_table(A.to(torch.complex64), B.to(torch.complex64))


def test_what_is_no_tensor_is_refused_by_name() -> None:
    b = torch.randn(64, 32)
    with pytest.raises(TypeError, match="dispatch_table: b is of type NoneType, must be a tensor"):
        nvgemm_runtime.dispatch_table(torch.randn(4, 64), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dispatch_table: a is of type list, must be a tensor"):
        nvgemm_runtime.dispatch_table([1.0], b)  # type: ignore[arg-type]
