"""Launches of real kernels, recorded on an emulated B200, for mutants and removed fences.

A directory holds a bundle for sm_100f, and for each kernel in it the PTX as ``<kernel id>.ptx``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nvgemm_aot.emulator.driver.caught_launch import CaughtLaunch
from nvgemm_aot.emulator.machine.global_memory import Region
from nvgemm_aot.emulator.machine.launch import Launch
from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch, record
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.session import emulated_device
from nvgemm_aot.targets.profile import load_profile
from nvgemm_aot.verify.device.cubin import Cubin
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op


@dataclass(frozen=True, kw_only=True)
class RecordedKernel:
    """A kernel, a launch of it with checked results, and what keeps its memory."""

    id: str
    operator: str
    launch: RecordedLaunch
    tensors: tuple[torch.Tensor, ...]


class Recorder:
    """Calls kernels of a directory's bundle."""

    def __init__(self, directory: Path) -> None:
        self._bundle_path = directory / "sm_100f.nvgemm"
        os.environ["NVGEMM_AOT_BUNDLES"] = str(self._bundle_path)
        self._programs = {
            path.stem: parse(path.read_text()) for path in sorted(directory.glob("*.ptx"))
        }
        self._launches: list[RecordedLaunch] = []
        emulated_device.start(load_profile("B200"), self._run)

    def _run(self, launch: CaughtLaunch, cubin: Cubin, regions: tuple[Region, ...]) -> None:
        (program,) = (each for each in self._programs.values() if each.entry == launch.kernel)
        layout = [(parameter.offset, parameter.size) for parameter in program.parameters]
        self._launches.append(
            record(
                program,
                Launch(
                    grid=launch.grid,
                    block=launch.block,
                    cluster=launch.cluster,
                    shared_bytes=launch.shared_bytes,
                    parameters=launch.parameter_bytes(layout, program.parameter_bytes),
                ),
                regions,
            )
        )
