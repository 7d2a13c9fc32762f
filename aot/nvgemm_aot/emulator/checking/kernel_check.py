"""Checks one kernel in a process that emulates its GPU."""

from __future__ import annotations

import enum
import gc
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError, one_line
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.launch.loading.loader import LOADER, LoadedKernel

from ...bundle.content import BuiltKernel, BundleContent
from ...bundle.writer import write_bundle
from ...providers.base import STATIC_PERSISTENT
from ...targets.profile import load_profile
from ...tuning.correctness.exact_operands import OperandCheck, make_checks
from ..machine.launch import Schedule
from ..machine.scheduler import Execution
from ..races.race_findings import UNWRITTEN
from ..session import emulated_device
from ..session.emulated_device import EmulatedDevice
from ..session.kept_programs import KeptPrograms
from ..session.ptx_runner import PtxRunner
from .user_calls import call_as_user

if TYPE_CHECKING:
    import torch

_GUARD_BYTES = 256
"""Bytes in front of and behind each row of a result that a kernel must leave alone."""

_DELAY = 6
"""Rounds by which asynchronous effects are late at most, for all seeds but 0."""

_MOST_CLUSTERS = (None, 1, 2)
"""Most clusters of a launch with a fixed number of blocks, by seed; None for the launcher's number.
With fewer clusters than tiles, a block computes several tiles."""

_OBJECTS_BEFORE_COLLECTION = 50_000
"""New objects after which Python looks for unreachable cycles, such as launches that have ended."""


class Verdict(enum.Enum):
    """Outcome of a kernel for one problem."""

    RIGHT = "right"
    SUSPECT = "suspect"
    """The result is right, and the kernel did what the emulator reports, such as reading shared
    memory that nobody has written."""
    WRONG = "wrong"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class KernelTask:
    """A kernel to check.

    Attributes:
        kernel: Facts and object.
        ptx: PTX from which its device code was assembled.
        target: Target that it was built for.
        device: Name of the product's profile.
        problems: Problems for its signature.
        seeds: Seeds for operands and schedule, each for every problem.
    """

    kernel: BuiltKernel
    ptx: str
    target: Target
    device: str
    problems: tuple[Problem, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A kernel's call for a problem and a seed.

    Attributes:
        operands: Name of the operands' kind, such as ``whole numbers``.
        reason: First fault; None if the result is right.
        launches: Launches that the call made.
        warp_instructions: Instructions that warps executed, in all launches.
        seconds: Time of the call and the comparison.
    """

    problem: Problem
    seed: int
    operands: str
    verdict: Verdict
    reason: str | None
    launches: int
    warp_instructions: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Outcome of a kernel.

    Attributes:
        runs: Its calls.
        instructions: Instructions in its PTX.
        idle: Lines of the PTX text whose instruction no warp executed.
    """

    runs: tuple[Run, ...]
    instructions: int = 0
    idle: tuple[int, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict."""
        verdicts = {run.verdict for run in self.runs}
        return next(
            (one for one in (Verdict.ERROR, Verdict.WRONG, Verdict.SUSPECT) if one in verdicts),
            Verdict.RIGHT,
        )

    @property
    def first_fault(self) -> Run | None:
        """The first run with the report's verdict, unless all are right."""
        verdict = self.verdict
        if verdict is Verdict.RIGHT:
            return None
        return next(run for run in self.runs if run.verdict is verdict)

    @property
    def share_run(self) -> float:
        """Share of the instructions that ran."""
        return 1 - len(self.idle) / self.instructions if self.instructions else 0.0


@dataclass(frozen=True, kw_only=True)
class _Session:
    """This process's emulated device."""

    device: EmulatedDevice
    runner: PtxRunner
    programs: KeptPrograms = field(default_factory=KeptPrograms)


_session: _Session | None = None


def start_session(device: str, cuda: str) -> None:
    """Makes this process emulate a GPU product, for `check_kernel`."""
    global _session
    programs = KeptPrograms()
    runner = PtxRunner(programs)
    emulated = emulated_device.start(load_profile(device), runner, cuda)
    import torch  # behind the stand-in: torch for CUDA loads the machine's own driver

    torch.set_num_threads(1)
    # Looking through all that was imported, again and again, took a tenth of the time.
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    _session = _Session(device=emulated, runner=runner, programs=programs)


def check_kernel(task: KernelTask) -> KernelReport:
    """Calls a kernel for each problem and seed, and compares each result with its reference."""
    session = _session
    assert session is not None  # the process has called `start_session`
    try:
        session.programs.add(task.kernel.payload, task.ptx)
        program = session.programs.only_program(task.kernel.payload)
        with tempfile.TemporaryDirectory() as directory:
            loaded = load_kernel(task, Path(directory))
    except NvgemmError as error:
        return failed_report(task, f"{type(error).__name__}: {error}")
    counts = [0] * len(program.instructions)
    runs = []
    for problem in task.problems:
        for seed in task.seeds:
            session.device.calls.clear()
            runs.append(_run(session, loaded, problem, seed))
            for execution in _executions(session.device):
                counts = [before + now for before, now in zip(counts, execution.counts)]
    return KernelReport(
        runs=tuple(runs),
        instructions=len(counts),
        idle=tuple(
            instruction.line
            for instruction, count in zip(program.instructions, counts)
            if not count
        ),
    )


def failed_report(task: KernelTask, reason: str) -> KernelReport:
    """Returns the report for a kernel that cannot be called at all."""
    run = Run(
        problem=task.problems[0],
        seed=task.seeds[0],
        operands="",
        verdict=Verdict.ERROR,
        reason=one_line(reason),
        launches=0,
        warp_instructions=0,
        seconds=0.0,
    )
    return KernelReport(runs=(run,))


def load_kernel(task: KernelTask, directory: Path) -> LoadedKernel:
    """Writes a kernel into a bundle in a directory, and loads it as a program does."""
    path = directory / "kernel.nvgemm"
    write_bundle(
        path,
        BundleContent(
            target=task.target,
            device=task.device,
            generator="nvgemm-aot emulate",
            build_key=sha256_hex(b"emulate"),
            toolchain={"nvgemm-aot": "emulate"},
            kernels=(task.kernel,),
            rankings=(),
        ),
    )
    with Bundle(path) as bundle:
        return LOADER.load(bundle, bundle.header.kernels[0])


def schedule_of(seed: int) -> Schedule:
    """Returns a seed's schedule: for seed 0 without delays, and for others with them."""
    return Schedule(seed=seed, delay=_DELAY if seed else 0, resident=1 + (seed + 1) % 3)


def _run(session: _Session, loaded: LoadedKernel, problem: Problem, seed: int) -> Run:
    """Calls a kernel with one kind of operands; the kinds take turns by the seed."""
    started = time.monotonic()
    checks = make_checks(problem, "cpu", seed=seed)
    check = checks[seed % len(checks)]
    session.runner.schedule = schedule_of(seed)
    session.runner.most_clusters = (
        _MOST_CLUSTERS[seed % len(_MOST_CLUSTERS)]
        if loaded.kernel.design.scheduler == STATIC_PERSISTENT
        else None
    )
    verdict: Verdict
    reason: str | None
    try:
        verdict, reason = next(_faults(session, loaded, check), (Verdict.RIGHT, None))
    except Exception as error:
        verdict, reason = Verdict.ERROR, one_line(f"{type(error).__name__}: {error}")
    executions = list(_executions(session.device))
    return Run(
        problem=problem,
        seed=seed,
        operands=check.name,
        verdict=verdict,
        reason=reason,
        launches=len(executions),
        warp_instructions=sum(execution.warp_instructions for execution in executions),
        seconds=time.monotonic() - started,
    )


def _faults(
    session: _Session, loaded: LoadedKernel, check: OperandCheck
) -> Iterator[tuple[Verdict, str]]:
    """Calls a kernel and yields what is wrong with its result, or with how it got there."""
    a, b, out, *others = check.operands
    frame, window = _framed(loaded, out)
    check = replace(check, operands=(a, b, window, *others))
    check.prepare()
    call_as_user(loaded, check.operands)
    fault = check.fault(window)
    executions = list(_executions(session.device))
    findings = [finding for execution in executions for finding in execution.findings]
    if fault is not None:
        cause = f"; perhaps since {findings[0]}" if findings else ""
        yield Verdict.WRONG, f"{check.name}: {fault}{cause}"
    written = (frame, *(check.operands[-1:] if check.expected_sums is not None else ()))
    results = tuple(tensor.clone() for tensor in written)
    window.view(_bytes_type()).fill_(_POISON)
    if int((frame != _POISON).sum()):
        yield Verdict.WRONG, f"{check.name}: bytes beside the result were written"
    if not executions:
        yield Verdict.WRONG, "the call launched no kernel"
    note = ""
    if any(execution.reads_unwritten for execution in executions):
        if not _is_repeated(session, loaded, check, written, results):
            yield Verdict.WRONG, f"{check.name}: the result depends on memory {UNWRITTEN}"
        note = "; with other contents there, the result is the same"
    for finding in findings:
        is_of_unwritten = finding.endswith(UNWRITTEN)
        yield Verdict.SUSPECT, f"{check.name}: {finding}{note if is_of_unwritten else ''}"


def _is_repeated(
    session: _Session,
    loaded: LoadedKernel,
    check: OperandCheck,
    written: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...],
) -> bool:
    """Tells if a call has the same results, to the bit, with other contents of unwritten memory.

    Args:
        session: This process's device.
        loaded: Kernel.
        check: Operands.
        written: Tensors that the call writes.
        results: Their contents behind the first call.
    """
    import torch

    schedule, calls = session.runner.schedule, list(session.device.calls)
    session.runner.schedule = replace(schedule, unwritten=_OTHER_CONTENT)
    try:
        check.prepare()
        call_as_user(loaded, check.operands)
    finally:
        session.runner.schedule = schedule
        session.device.calls[:] = calls
    return all(map(torch.equal, written, results))


_POISON = 0xFF

_OTHER_CONTENT = 0x4B
"""Byte that makes a finite number of each floating-point type, unlike `Schedule.unwritten`."""


def _bytes_type() -> torch.dtype:
    import torch

    return torch.uint8


def _framed(loaded: LoadedKernel, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a poisoned frame as bytes, and the window in it that takes the result."""
    import torch

    convention = parse_calling_convention(loaded.kernel.calling_convention)
    assert convention is not None  # it was loaded
    *lead, columns = out.shape
    row_bytes = columns * out.element_size()
    if convention.needs_compact:
        frame = torch.full(
            (2 * _GUARD_BYTES + math.prod(lead) * row_bytes,), _POISON, dtype=torch.uint8
        )
        window = frame[_GUARD_BYTES:-_GUARD_BYTES].view(out.dtype).view(out.shape)
        return frame, window
    padded = -(-row_bytes // _GUARD_BYTES) * _GUARD_BYTES
    frame = torch.full((*lead, padded + 2 * _GUARD_BYTES), _POISON, dtype=torch.uint8)
    window = frame[..., _GUARD_BYTES : _GUARD_BYTES + row_bytes].view(out.dtype)
    return frame, window


def _executions(device: EmulatedDevice) -> Iterator[Execution]:
    for call in device.calls:
        for _, execution in call.launches:
            assert isinstance(execution, Execution)
            yield execution
