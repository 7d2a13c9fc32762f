"""The bench of this machine's GPU, where one kernel hangs: for a process that tests watch."""

from __future__ import annotations

import os
from typing import Any

import torch

from nvgemm_aot.tuning import contenders
from nvgemm_aot.tuning.measuring.gpu import Bench, gpu_bench

CYCLES = 10**12
"""Clock cycles that the kernel takes: over eight minutes at 2 GHz."""


def make() -> Bench:
    """The kernel that HANGING_KERNEL names sleeps on the GPU instead of computing anything."""
    kernel_run = contenders.kernel_run

    def run_of(bundle: Any, kernel: Any) -> Any:
        if kernel.id != os.environ["HANGING_KERNEL"]:
            return kernel_run(bundle, kernel)
        return lambda *operands: torch.cuda._sleep(CYCLES)

    contenders.kernel_run = run_of
    return gpu_bench()
