"""The bench of this machine: its current GPU, and what times it."""

from __future__ import annotations

import datetime
import time

from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import device_facts, torch_versions

from .gpu_state import watch_gpu
from .measuring import Bench
from .timer import GpuTimer, buffer_bytes


def gpu_bench() -> Bench:
    """The current CUDA device of torch.

    Raises:
        TuningError: If torch sees none.
    """
    import torch

    if not torch.cuda.is_available():
        raise TuningError(
            f"torch {torch.__version__} sees no GPU, and kernels are measured on one; run: "
            "nvgemm-aot doctor"
        )
    index = torch.cuda.current_device()
    return Bench(
        facts=device_facts("cuda", index),
        device=f"cuda:{index}",
        versions=torch_versions(),
        timer=GpuTimer(),
        watch=watch_gpu(f"GPU-{torch.cuda.get_device_properties(index).uuid}"),
        buffer_bytes=buffer_bytes(),
        sleep=time.sleep,
        today=lambda: datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )
