"""Plain torch.compile with rankings of another torch, confirmed with this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_provider
import tuning_bench
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY, TIMES, operands
from measured_bundles import write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.confirming.confirm_kernels import Confirmed, confirm
from nvgemm_aot.tuning.confirming.confirmed_output import write_confirmations
from nvgemm_runtime.bundle.reader import Bundle
from tuning_bench import DictatedTimer

pytestmark = pytest.mark.usefixtures("counted_anew", "default_mode")

OTHER_TORCH = "2.10.0+cu130"


@pytest.fixture
def default_mode(inductor: InductorSession, tmp_path: Path) -> Iterator[None]:
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    inductor.monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path / "confirmed"))
    with torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False):
        yield


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("confirmed")
    directory.chmod(0o755)
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    return tuning_bench.build(problems, directory / "built", kernel_cache)


@pytest.fixture
def elsewhere(built: Path, tmp_path: Path) -> Path:
    """A bundle whose ATen was measured with another torch."""
    return write_measured(built, tmp_path / "measured" / "x.nvgemm", TIMES, torch=OTHER_TORCH)


Times = Mapping[int, Mapping[str, int]]


def confirm_by(
    monkeypatch: pytest.MonkeyPatch, times: Times, *paths: Path, **how: Any
) -> Confirmed:
    """Confirm bundles by dictated times."""
    with monkeypatch.context() as patch:
        timer = DictatedTimer({"": [1.0]}, times_at=lambda m, name: times[m][name])
        timer.watch_runs(patch)
        opened = [Bundle(path) for path in paths]
        try:
            return confirm(opened, tuning_bench.bench(timer), **how)
        finally:
            for bundle in opened:
                bundle.close()


def launched_by_m(inductor: InductorSession) -> dict[int, str | None]:
    """Which kernel a graph for any m launches, None for ATen."""
    a, b = operands(16)
    torch._dynamo.mark_dynamic(a, 0)
    torch._dynamo.reset()
    compiled = inductor.compile(torch.mm, a, b, dynamic=None)
    found: dict[int, str | None] = {}
    for m in COMPUTED_BY:
        a, b = operands(m)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        names = inductor.launched(compiled.function, a, b)
        found[m] = names[0] if names else None
    return found


def test_confirmed_kernels_run_with_another_torch(
    inductor: InductorSession, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor.use(elsewhere)
    assert set(launched_by_m(inductor).values()) == {None}
    confirmed = confirm_by(monkeypatch, TIMES, elsewhere)
    path = write_confirmations(confirmed.confirmations, None)
    inductor.use(elsewhere)
    assert launched_by_m(inductor) == COMPUTED_BY
    path.unlink()
    inductor.use(elsewhere)
    assert set(launched_by_m(inductor).values()) == {None}
