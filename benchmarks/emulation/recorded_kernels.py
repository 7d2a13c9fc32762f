"""Launches of ten kernels on an emulated B200, each for two problems, for mutants.

They own what they need: a process that replays them has neither an emulated device nor torch.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.emulation.mutant_runs import RecordedKernel, judge_launches
from nvgemm_aot.emulator.checking.kernel_check import KernelTask, load_kernel
from nvgemm_aot.emulator.checking.manifest_tasks import PlannedKernel, prepare
from nvgemm_aot.emulator.checking.small_problems import small_problems
from nvgemm_aot.emulator.checking.user_calls import call_as_user
from nvgemm_aot.emulator.driver.caught_launch import CaughtLaunch
from nvgemm_aot.emulator.machine.global_memory import Region
from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch, record
from nvgemm_aot.emulator.mutants.verdict import Outcome
from nvgemm_aot.emulator.session import emulated_device
from nvgemm_aot.emulator.session.kept_programs import KeptPrograms
from nvgemm_aot.emulator.session.ptx_runner import emulated_launch
from nvgemm_aot.pipeline.compiler import make_tasks
from nvgemm_aot.pipeline.workers import Workers
from nvgemm_aot.providers import load_provider
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_aot.targets.profile import load_profile
from nvgemm_aot.tuning.correctness.exact_operands import make_checks
from nvgemm_aot.verify.device.cubin import Cubin
from nvgemm_runtime.bundle.format import KernelFacts
from nvgemm_runtime.errors import NvgemmError, one_line
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.matching.device import host_platform

ARCH = "sm_100f"

_BF16, _FP8, _FP4 = "bf16xbf16/fp32/bf16", "fp8_e4m3xfp8_e4m3/fp32/bf16", "fp4_e2m1xfp4_e2m1"

KERNELS = (
    ("quack", f"mm/tn/{_BF16}", "GemmDefaultSm100_clc_cluster1x1x1_tile128x64x64"),
    ("quack", f"mm/tn/{_BF16}", "GemmDefaultSm100_clc_cluster2x1x1_tile256x64x64"),
    ("quack", f"mm/tn/{_BF16}", "cluster1x1x1_tile128x16x64_swap_ab_split_k2_serial"),
    ("quack", f"mm/tn/{_BF16}/swiglu_halves", "cluster1x1x1_tile128x64x64"),
    ("quack", f"grouped_mm/tn/{_BF16}", "cluster2x1x1_tile128x64x64"),
    ("cutlass_operators", f"mm/tn/{_BF16}", "1cta_preferred2x2x1_fallback2x1x1_tile64x32x64"),
    ("cutlass_operators", f"mm/tn/{_BF16}/bias_gelu_tanh", "1cta_cluster1x1x1_tile128x32x64"),
    ("cutlass_operators", f"bmm/tn/{_BF16}", "1cta_cluster1x1x1_tile64x32x64_schedulerCLC"),
    ("cutlass_operators", f"mm/tn/{_FP8}/fp32_tensor", "2cta_cluster2x2x1_tile256x32x128"),
    (
        "cutlass_operators",
        f"mm/tn/{_FP4}/fp32/bf16/e4m3_1x16",
        "2cta_cluster2x1x1_tile256x64x256",
    ),
)
"""Provider, signature, and a part of the operator's name that only one candidate has."""


def two_problems(kernel: KernelFacts) -> tuple[Problem, Problem]:
    """Returns a problem of several tiles, and a deep one, which reuses pipeline stages.

    The last tile along k is nearly full in the first, and nearly empty in the second.
    """
    *_, several_tiles, deep = small_problems(kernel)
    return several_tiles, deep


def kernel_tasks(cache: Cache, *, jobs: int) -> Iterator[KernelTask]:
    """Compiles the kernels with their PTX, unless the cache has them.

    Raises:
        ValueError: If a provider offers not one kernel of that name, or it does not compile.
    """
    target = build_target(ARCH, platform=host_platform())
    planned = []
    for name, key, part in KERNELS:
        provider = load_provider(name)
        candidates = provider.enumerate(Signature.parse(key), target).candidates
        found = [one for one in candidates if part in one.operator]
        exact = [one for one in found if one.operator.endswith(part)] or found
        if len(exact) != 1:
            raise ValueError(
                f"{name} offers {len(exact)} kernels named {part} for {key}, must be 1: change "
                "KERNELS"
            )
        planned += [PlannedKernel(task=task) for task in make_tasks(exact, target, provider)]
    prepared = prepare(planned, cache, jobs=jobs, seeds=(0,))
    for failure in prepared.failures:
        raise ValueError(f"{failure.task.candidate.operator}: {failure.own_reason}")
    for task in prepared.tasks:
        yield replace(task, problems=two_problems(task.kernel))


def recorded_kernels(tasks: list[KernelTask], *, jobs: int) -> list[RecordedKernel]:
    """Records kernels in child processes, which start the emulated device before torch.

    Raises:
        ValueError: If a kernel cannot be recorded.
    """
    prepare_worker = functools.partial(start_recording, tasks[0].device, tasks[0].target.cuda)
    with Workers(min(jobs, len(tasks)), record_kernel, prepare_worker) as workers:
        outcomes = {task.kernel.id: outcome for task, outcome in workers.run(tasks)}
    found = [outcomes[task.kernel.id] for task in tasks]
    for task, outcome in zip(tasks, found):
        if not isinstance(outcome, RecordedKernel):
            raise ValueError(f"{task.kernel.operator} is not recorded: {outcome}")
    return [each for each in found if isinstance(each, RecordedKernel)]


class _Recorder:
    """Records what the emulated device is asked to launch."""

    def __init__(self) -> None:
        self.programs = KeptPrograms()
        self.launches: list[RecordedLaunch] = []

    def __call__(self, caught: CaughtLaunch, cubin: Cubin, regions: tuple[Region, ...]) -> None:
        program = self.programs(cubin, caught.kernel)
        self.launches.append(record(program, emulated_launch(caught, program), regions))


_recorder = _Recorder()


def start_recording(device: str, cuda: str) -> None:
    """Makes this process emulate a GPU product, for `record_kernel`."""
    emulated_device.start(load_profile(device), _recorder, cuda)
    import torch  # behind the stand-in: torch for CUDA loads the machine's own driver

    torch.set_num_threads(1)


def record_kernel(task: KernelTask) -> RecordedKernel | str:
    """Calls a kernel for each problem; returns the reason if a result or a launch is not right."""
    _recorder.programs.add(task.kernel.payload, task.ptx)
    _recorder.launches.clear()
    try:
        with tempfile.TemporaryDirectory() as directory:
            loaded = load_kernel(task, Path(directory))
        for number, problem in enumerate(task.problems):
            checks = make_checks(problem, "cpu", seed=number)
            check = checks[number % len(checks)]  # whole numbers, then few products
            check.prepare()
            call_as_user(loaded, check.operands)
            if fault := check.fault(check.operands[2]):
                return f"{problem.key}: {fault}"
    except (NvgemmError, RuntimeError, ValueError) as error:
        return one_line(f"{type(error).__name__}: {error}")
    launches = tuple(_recorder.launches)
    if len(launches) != len(task.problems):
        return f"{len(task.problems)} calls made {len(launches)} launches"
    findings = [finding for launch in launches for finding in launch.execution.findings]
    if findings:
        return findings[0]
    unchanged = judge_launches(launches, launches[0].program)
    if unchanged.outcome is not Outcome.SURVIVED:
        return f"without a change it ends by {unchanged.outcome.value}: {unchanged.message}"
    return RecordedKernel(name=f"{task.kernel.operator} {task.kernel.id[:12]}", launches=launches)
