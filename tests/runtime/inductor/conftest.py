"""What tests of several files in this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvgemm_runtime
from inductor_session import InductorSession


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 64), torch.randn(64, 32)


@pytest.fixture
def counted_anew() -> Iterator[None]:
    nvgemm_runtime.reset_stats()
    yield
    nvgemm_runtime.reset_stats()


@pytest.fixture
def events(inductor: InductorSession, tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """What becomes of each GEMM."""
    return inductor.watch_events(tmp_path / "events")


@pytest.fixture
def met(events: Callable[[], list[dict[str, Any]]]) -> Callable[[], list[dict[str, Any]]]:
    """The GEMMs that came up."""
    return lambda: [event for event in events() if event["event"] == "met"]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the choices that Inductor times, in order."""
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
    from torch._inductor.select_algorithm import ExternKernelCaller

    names: list[str] = []
    for kind in (ExternKernelCaller, SubgraphChoiceCaller):

        def noting(choice: Any, *arguments: Any, of: Any = kind.benchmark, **options: Any) -> Any:
            names.append(choice.name)
            return of(choice, *arguments, **options)

        monkeypatch.setattr(kind, "benchmark", noting)
    return names
