"""Bundles of kernels for the CPU that are confirmed by times that a test dictates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tuning_bench
from nvgemm_aot.tuning.confirming.confirm_kernels import Confirmed, confirm
from nvgemm_aot.tuning.measuring.gpu import Bench
from nvgemm_runtime.bundle.confirmations import Confirmations, ConfirmedTimes
from nvgemm_runtime.bundle.ranking_entries import APART, Conditions, Timing
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.installed.confirmed_files import confirmed_directory, confirmed_name
from nvgemm_runtime.matching.device import torch_versions
from tuning_bench import DictatedTimer, bench

OTHER_TORCH = "2.10.0+cu130"
"""Version of a torch that no test runs with."""


def confirm_by(
    times: Mapping[int, Mapping[str, int]], *paths: Path, on: Bench | None = None, **how: Any
) -> Confirmed:
    """Confirm bundles by times of operators and ATen, by m."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        timer = DictatedTimer({"": [1.0]}, times_at=lambda m, name: times[m][name])
        timer.watch_runs(patch)
        opened = [stack.enter_context(Bundle(path)) for path in paths]
        return confirm(opened, on or bench(timer), **how)


def user_file() -> Path:
    """Where the command writes for this CPU and torch."""
    versions = torch_versions()
    name = confirmed_name(tuning_bench.bench().facts.name, versions.torch, versions.cuda)
    return confirmed_directory() / name


def confirmations_of(kernel_id: str) -> Confirmations:
    """Made-up times of one kernel on another machine's GPU."""
    times = ConfirmedTimes(
        kernels={kernel_id: Timing(time_ns=1000, spread_ns=1)},
        aten=Timing(time_ns=2000, spread_ns=1),
    )
    conditions = Conditions(
        driver="580.95.05", torch="2.11.0", cuda="13.0", date="2026-11-21", launches=APART
    )
    return Confirmations(
        gpu="NVIDIA H200",
        by="a test",
        conditions=conditions,
        problems={"mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096": times},
    )


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a file's document."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
