"""Choices are compared by what they take on the GPU; their times are made up here."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.autotune_process import TritonGPUBenchmarkRequest
from torch._inductor.runtime import benchmarking

from imitated_gpu import Machine, imitate
from inductor_session import InductorSession
from nvgemm_runtime.inductor.autotuning import choice_timing, gpu_times


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A benchmarker of torch's, alone; returns what `measure_ms` was called with."""
    asked: list[float] = []

    def measure(call: Callable[[], object], *, longest_ms: float) -> float:
        asked.append(longest_ms)
        call()
        return 0.5

    monkeypatch.setattr(gpu_times, "measure_ms", measure)
    monkeypatch.setattr(benchmarking, "benchmarker", benchmarking.InductorBenchmarker())
    monkeypatch.setattr(benchmarking.InductorBenchmarker, "benchmark_gpu", lambda *_, **__: 35.4)
    return asked


class Request:
    """A benchmark request of Inductor's."""

    module_path = "x.py"

    def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
        time = benchmarking.benchmarker.benchmark_gpu(lambda: None, warmup=25, rep=100)
        return float(time)


def test_a_request_is_still_of_its_class() -> None:
    """Inductor compiles those of Triton's in processes beside this one, and others here."""
    request = object.__new__(TritonGPUBenchmarkRequest)
    request.module_path = "x.py"
    timed: Any = choice_timing.TimedRequest(request)
    assert isinstance(timed, TritonGPUBenchmarkRequest)
    copy = pickle.loads(pickle.dumps(timed))
    assert type(copy) is choice_timing.TimedRequest
    assert isinstance(copy, TritonGPUBenchmarkRequest)
    assert copy.module_path == "x.py"


class Choice:
    """A choice of Inductor's: with a request, as kernels have, or timed by itself."""

    def __init__(self, request: Request | None) -> None:
        self.bmreq = request

    def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor) -> float:
        return (self.bmreq or Request()).benchmark(*tensors, out=out)

    def hash_key(self) -> str:
        return "key"


def test_choices_of_every_kind_are_timed_alike(timer: list[float]) -> None:
    out = torch.empty(1)
    choices = [Choice(Request()), Choice(None)]
    before = Choice(Request())
    choice_timing.time_on_gpu(choices[:1], choices[1:])
    assert [choice.benchmark(out=out) for choice in choices] == [0.5, 0.5]
    assert [choice.hash_key() for choice in choices] == ["key-on-gpu-under-load"] * 2
    assert before.benchmark(out=out) == 35.4, "what did not join is timed as Inductor does"
    assert before.hash_key() == "key"
    assert timer == [gpu_times.LONGEST_MS] * 2


def test_a_choice_that_has_a_request_and_times_itself_is_timed_alike(timer: list[float]) -> None:
    """So a part of a graph does, where autotuning is pipelined."""

    class Part(Choice):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor) -> float:
            return Request().benchmark(*tensors, out=out)

    choice = Part(None)
    choice._bmreq = Request()  # type: ignore[attr-defined]
    choice_timing.time_on_gpu([choice], [])
    assert choice.benchmark(out=torch.empty(1)) == 0.5
    assert choice._bmreq.benchmark() == 0.5  # type: ignore[attr-defined]


def test_a_request_is_timed_alike_in_another_process(timer: list[float]) -> None:
    choice = Choice(Request())
    choice_timing.time_on_gpu([choice], [])
    request: Any = pickle.loads(pickle.dumps(choice.bmreq))
    request.kernel_name = "renamed"
    assert request.benchmark() == 0.5
    assert (request.module_path, request.kernel_name) == ("x.py", "renamed")


def test_what_is_compiled_to_be_timed_is_tuned_as_usual(timer: list[float]) -> None:
    """A part of a graph has choices of its own, whose times are kept as Inductor's."""

    class Part(Choice):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor) -> float:
            with choice_timing.timing_as_usual():
                assert Request().benchmark() == 35.4
            return super().benchmark(*tensors, out=out)

    choice = Part(None)
    choice_timing.time_on_gpu([choice], [])
    assert choice.benchmark(out=torch.empty(1)) == 0.5


def test_a_failure_leaves_inductors_timing_as_it_was(timer: list[float]) -> None:
    class Failing(Request):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
            raise RuntimeError("too much shared memory")

    choice = Choice(Failing())
    choice_timing.time_on_gpu([choice], [])
    with pytest.raises(RuntimeError, match="shared memory"):
        choice.benchmark(out=torch.empty(1))
    assert Choice(Request()).benchmark(out=torch.empty(1)) == 35.4


def test_the_time_that_a_user_allows_is_kept_to(timer: list[float]) -> None:
    class Short(Request):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
            return float(benchmarking.benchmarker.benchmark_gpu(lambda: None, rep=2))

    choice = Choice(Short())
    choice_timing.time_on_gpu([choice], [])
    choice.benchmark(out=torch.empty(1))
    assert timer == [2.0]


class Profiling(benchmarking.InductorBenchmarker):
    """A benchmarker that the user chose."""


@pytest.mark.parametrize("setting", ["profiler", "benchmarker", "replaced"])
def test_a_way_of_measuring_that_the_user_chose_is_kept(
    timer: list[float], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    with contextlib.ExitStack() as stack:
        if setting == "profiler":
            stack.enter_context(config.patch(profile_bandwidth_with_do_bench_using_profiling=True))
        elif setting == "benchmarker":
            monkeypatch.setattr(benchmarking, "benchmarker", Profiling())
        else:
            benchmarking.benchmarker.benchmark_gpu = lambda *_, **__: 35.4
        choice = Choice(Request())
        choice_timing.time_on_gpu([choice], [])
        assert choice.benchmark(out=torch.empty(1)) == 35.4
        assert choice.hash_key() == "key"


@dataclass
class Launched:
    """A choice that the host takes some time to launch, and the GPU to compute; microseconds."""

    name: str
    host_us: float
    gpu_us: float

    def benchmark(self) -> float:
        on_gpu = getattr(choice_timing._thread, "measure", None) is not None
        # Inductor's events are 5 us apart before the launch counts.
        return (self.gpu_us + (0.0 if on_gpu else max(0.0, self.host_us - 5.0))) / 1e3

    def hash_key(self) -> str:
        return self.name


ATEN, TRITON = Launched("aten", 30.0, 10.0), Launched("triton", 10.0, 14.0)
SLOW_ATEN = Launched("aten", 30.0, 40.0)


@pytest.mark.parametrize(
    ("others", "kernels_us", "winner"),
    [
        pytest.param([ATEN, TRITON], [15.0], "triton", id="Inductor's choice stands"),
        pytest.param([ATEN, TRITON], [16.0, 13.0], "kernel 13.0", id="a kernel beats it"),
        pytest.param([TRITON, ATEN], [13.0, 12.0], "kernel 12.0", id="the quickest kernel"),
        pytest.param([Launched("aten", 9.0, 10.0), TRITON], [11.0], "aten", id="a cheaper launch"),
        pytest.param([SLOW_ATEN, TRITON], [13.7], "kernel 13.7", id="ATen loses in both"),
        pytest.param([SLOW_ATEN, TRITON], [13.9], "triton", id="a gain within noise"),
    ],
)
def test_kernels_join_inductors_choice_only_where_they_beat_it_on_the_gpu(
    timer: list[float], others: list[Launched], kernels_us: list[float], winner: str
) -> None:
    """In calls, the launch of Inductor's winner counts; in CUDA graphs, its time on the GPU."""
    stock = min(others, key=lambda choice: choice.benchmark())
    others = [Launched(**vars(choice)) for choice in others]
    kernels = [Launched(f"kernel {us}", 6.0, us) for us in kernels_us]
    choice_timing.time_against_inductor(others, kernels)
    times = {choice.name: choice.benchmark() for choice in (*others, *kernels)}
    assert min(times, key=times.__getitem__) == winner
    assert times[stock.name] == stock.benchmark(), "as Inductor has it"
    assert {choice.hash_key() for choice in others} == {"aten", "triton"}
    assert all(one.hash_key() == f"{one.name}-beside-under-load" for one in kernels)


@dataclass
class Repeated:
    """A choice that takes other times when it is timed again; microseconds."""

    name: str
    gpu_us: list[float]
    timed: int = 0

    def benchmark(self) -> float:
        self.timed += 1
        return self.gpu_us[min(self.timed, len(self.gpu_us)) - 1] / 1e3

    def hash_key(self) -> str:
        return self.name


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("aten_us", "kernels_us", "winner", "timings"),
    [
        pytest.param([20.0, 10.0], [12.0], "aten", 2, id="disturbed at first"),
        pytest.param([20.0, 10.0], [12.0, 9.0], "kernel 9.0", 2, id="one beats both of its times"),
        pytest.param([10.0, 14.0], [12.0], "aten", 1, id="a kernel that loses asks for nothing"),
        pytest.param([10.0, 14.0], [9.0], "kernel 9.0", 2, id="disturbed the second time"),
        pytest.param([10.0, 10.0, 8.5], [9.5, 8.0], "kernel 8.0", 2, id="once for all kernels"),
        pytest.param([10.0, 10.2, 9.4], [9.5, 9.0], "kernel 9.0", 2, id="the quicker kernel"),
    ],
)
def test_what_a_kernel_beats_is_timed_again(
    timer: list[float],
    beside: bool,
    aten_us: list[float],
    kernels_us: list[float],
    winner: str,
    timings: int,
) -> None:
    """Inductor times ATen first, on a GPU that was idle while torch compiled."""
    inductors_us = aten_us[:1] if beside else []  # it times its own choice in its own way before
    aten = Repeated("aten", inductors_us + aten_us)
    kernels = [Repeated(f"kernel {us}", [us]) for us in kernels_us]
    time = choice_timing.time_against_inductor if beside else choice_timing.time_on_gpu
    time([aten], kernels)
    times = {choice.name: choice.benchmark() for choice in (aten, *kernels)}
    assert min(times, key=times.__getitem__) == winner
    assert times["aten"] == aten_us[0] / 1e3, "what Inductor was told stays"
    assert aten.timed == len(inductors_us) + timings


class Working:
    """A choice whose call keeps an imitated GPU busy.

    Attributes:
        gpu_us: Microseconds that a call takes.
        elsewhere: Whether another process calls it.
        error: What calls raise; an infinite time tells of it, as Inductor's own choices do.
    """

    def __init__(self, machine: Machine, gpu_us: float, *, elsewhere: bool = False) -> None:
        self.machine, self.gpu_us, self.elsewhere = machine, gpu_us, elsewhere
        self.error: Exception | None = None

    def call(self) -> None:
        if self.error is not None:
            raise self.error
        self.machine.last = self
        self.machine.run(host_us=20.0, gpu_us=self.gpu_us)

    def benchmark(self, *_: torch.Tensor, out: torch.Tensor | None = None) -> float:
        try:
            if self.elsewhere:
                return gpu_times.measure_ms(self.call)
            return float(benchmarking.benchmarker.benchmark_gpu(self.call, rep=100))
        except Exception:
            return float("inf")

    def hash_key(self) -> str:
        return "key"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(benchmarking, "benchmarker", benchmarking.InductorBenchmarker())
    monkeypatch.setattr(
        benchmarking.InductorBenchmarker,
        "benchmark_gpu",
        lambda self, call, **_: gpu_times.measure_ms(call),
    )
    return imitate(monkeypatch)


def extern_call(machine: Machine, gpu_us: float) -> Any:
    """A call of ATen's as Inductor has it, with a request that is timed on the imitated GPU."""
    from torch._inductor.autotune_process import ExternKernelGPUBenchmarkRequest
    from torch._inductor.select_algorithm import ExternKernelCaller

    class OnImitatedGpu(ExternKernelGPUBenchmarkRequest):  # type: ignore[misc]
        def __init__(self) -> None:
            self.kernel_name = "aten"
            self.has_out_variant = True

        def make_run_fn(self, *_: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
            return functools.partial(machine.run, host_us=20.0, gpu_us=gpu_us)

        def do_bench(self, fn: Callable[[], None], *_: Any) -> float:
            return float(benchmarking.benchmarker.benchmark_gpu(fn))

    choice = object.__new__(ExternKernelCaller)
    choice.bmreq = OnImitatedGpu()
    choice._benchmark_with_cudagraphs = False
    choice.hash_key = lambda: "key"
    return choice


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("aten_us", [150.0, 2500.0])
def test_atens_call_is_timed_again_beside_kernels(
    machine: Machine, beside: bool, aten_us: float
) -> None:
    """Short or long; what Inductor times it with, a kernel is timed with, too."""
    machine.boost = 1.3  # it is the slower at first, as an idle GPU may be
    aten, kernel = extern_call(machine, aten_us), Working(machine, 1.02 * aten_us)
    time = choice_timing.time_against_inductor if beside else choice_timing.time_on_gpu
    time([aten], [kernel])
    out = torch.empty(1)
    first = aten.benchmark(out=out)
    machine.boost = 1.0
    assert kernel.benchmark(out=out) > first


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("before_us", [0.0, 40e3, 60e3, 80e3])
def test_long_kernels_are_not_compared_with_what_ran_at_higher_clocks(
    machine: Machine, beside: bool, before_us: float
) -> None:
    """The GPU was idle while torch compiled, and its clocks fall once it has worked for 100 ms."""
    machine.boost, machine.worked_us = 0.86, before_us
    aten, slow, quick = (Working(machine, us) for us in (2500.0, 2600.0, 2300.0))
    time = choice_timing.time_against_inductor if beside else choice_timing.time_on_gpu
    time([aten], [slow, quick])
    times = [choice.benchmark() for choice in (aten, slow, quick)]
    assert times[2] < times[0] < times[1]
    share = choice_timing.LEAST_GAIN if beside else 1.0
    assert times[2] / times[0] == pytest.approx(0.92 / share, rel=0.002)
    assert times[1] / times[0] == pytest.approx(1.04 / share, rel=0.002)


@pytest.mark.parametrize("before_us", [0.0, 20e3, 40e3, 60e3, 80e3])
def test_nor_is_a_choice_that_is_timed_at_several_sizes(machine: Machine, before_us: float) -> None:
    machine.boost, machine.worked_us = 0.86, before_us
    aten, by_m = Working(machine, 2500.0), Working(machine, 2300.0)
    choice_timing.time_on_gpu([aten], [by_m])
    sizes = [lambda: ([], torch.empty(1))] * 4
    choice_timing.time_over_sizes([aten], by_m, lambda choice: choice is aten, sizes)
    first = aten.benchmark()
    assert by_m.benchmark() / first == pytest.approx(0.92, rel=0.002)


def test_short_kernels_are_timed_by_themselves(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their calls with a warm cache count too."""
    monkeypatch.delattr(gpu_times, "measure_in_turns_ms")
    aten, kernel = Working(machine, 95.0), Working(machine, 90.0)
    choice_timing.time_on_gpu([aten], [kernel])
    assert aten.benchmark() > kernel.benchmark()


def test_a_long_kernel_that_another_process_calls_is_timed_by_itself(machine: Machine) -> None:
    aten = Working(machine, 2500.0)
    kernels = [Working(machine, us, elsewhere=True) for us in (2300.0, 2600.0)]
    choice_timing.time_on_gpu([aten], kernels)
    times = [choice.benchmark() for choice in (aten, *kernels)]
    assert [one / times[0] for one in times] == pytest.approx([1.0, 0.92, 1.04], rel=0.002)


@pytest.mark.parametrize("failing", [False, True])
def test_a_kernel_is_timed_by_itself_where_the_other_cannot_be_called_again(
    machine: Machine, failing: bool
) -> None:
    """What was timed before is called elsewhere now, or memory has run out: no kernel's fault."""
    aten, kernel = Working(machine, 2500.0), Working(machine, 2600.0)
    choice_timing.time_on_gpu([aten], [kernel])
    first = aten.benchmark()
    aten.elsewhere, aten.error = not failing, MemoryError() if failing else None
    assert kernel.benchmark() / first == pytest.approx(1.04, rel=0.002)


def test_a_kernel_that_fails_in_turns_is_not_used(machine: Machine) -> None:
    aten, failing, kernel = (Working(machine, us) for us in (2500.0, 2200.0, 2300.0))
    choice_timing.time_on_gpu([aten], [failing, kernel])
    failing.error = RuntimeError("too many resources")
    first = aten.benchmark()
    assert failing.benchmark() == float("inf")
    assert kernel.benchmark() / first == pytest.approx(0.92, rel=0.002)


def test_an_error_before_the_call_is_the_others(machine: Machine) -> None:
    """So the race against what Inductor has instead ends where that cannot be compiled again."""

    class Untimed(Working):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
            if self.error is not None:
                raise self.error
            return super().benchmark(*tensors, out=out)

    unfused, kernel = Untimed(machine, 2500.0), Working(machine, 2300.0)
    choice_timing.time_against_inductor([unfused], [kernel])
    unfused.benchmark()
    unfused.error = ValueError("no compiler")
    with pytest.raises(ValueError, match="no compiler"):
        kernel.benchmark()


def test_the_kernels_result_is_what_is_left(machine: Machine) -> None:
    """Torch may be told to compare what a choice has written."""
    aten, kernel = Working(machine, 2500.0), Working(machine, 2600.0)
    choice_timing.time_on_gpu([aten], [kernel])
    aten.benchmark()
    kernel.benchmark()
    assert machine.last is kernel


@pytest.mark.parametrize(("aten_us", "in_turns"), [(90.0, False), (110.0, True)])
def test_calls_are_long_from_a_tenth_of_a_millisecond_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, aten_us: float, in_turns: bool
) -> None:
    seen: list[dict[str, float]] = []

    def measure(*_: Callable[[], object], **limits_ms: float) -> tuple[float, float]:
        seen.append(limits_ms)
        return 1.0, 2.0

    monkeypatch.setattr(gpu_times, "measure_in_turns_ms", measure)
    aten, kernels = Working(machine, aten_us), [Working(machine, 105.0) for _ in range(3)]
    choice_timing.time_on_gpu([aten], kernels)
    first = aten.benchmark()
    assert [(one.benchmark() / first == 0.5) for one in kernels] == [in_turns] * 3
    assert [one["longest_ms"] for one in seen] == [gpu_times.LONGEST_MS] * 3 * in_turns
    assert [one["load_ms"] for one in seen] == [choice_timing.LOAD_MS, 0.0, 0.0][: 3 * in_turns]


def test_the_load_is_for_the_first_kernel_that_is_timed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[float] = []
    in_turns = gpu_times.measure_in_turns_ms

    def measure(*calls: Callable[[], object], **limits_ms: float) -> tuple[float, float]:
        loads.append(limits_ms["load_ms"])
        return in_turns(*calls, **limits_ms)

    monkeypatch.setattr(gpu_times, "measure_in_turns_ms", measure)
    aten, *kernels = (Working(machine, us) for us in (2500.0, 2200.0, 2300.0, 2400.0))
    choice_timing.time_on_gpu([aten], kernels)
    kernels[0].error = RuntimeError("too many resources")
    for choice in (aten, *kernels):
        choice.benchmark()
    assert loads == [choice_timing.LOAD_MS, choice_timing.LOAD_MS, 0.0]


def test_of_several_sizes_the_first_long_one_has_the_load(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[float] = []
    monkeypatch.setattr(
        gpu_times,
        "measure_in_turns_ms",
        lambda *_, load_ms, **__: (loads.append(load_ms), (1.0, 2.0))[1],
    )
    aten, by_m = Working(machine, 90.0), Working(machine, 80.0)
    choice_timing.time_on_gpu([aten], [by_m])
    sizes: list[choice_timing.SizedOperands] = []
    for us in (80.0, 300.0, 400.0):

        def make(us: float = us) -> tuple[list[torch.Tensor], torch.Tensor]:
            aten.gpu_us = by_m.gpu_us = us
            return [], torch.empty(1)

        sizes.append(make)
    choice_timing.time_over_sizes([aten], by_m, lambda choice: choice is aten, sizes)
    aten.benchmark()
    by_m.benchmark()
    assert loads == [choice_timing.LOAD_MS, 0.0]


def test_the_kernel_that_is_fastest_under_load_is_taken(machine: Machine) -> None:
    """The other one is the faster at the clocks of a GPU that was idle."""

    class Hungry(Working):
        def call(self) -> None:
            is_idle = self.machine.worked_us < 85e3
            self.machine.run(host_us=20.0, gpu_us=2200.0 if is_idle else 2400.0)

    aten, hungry, steady = Working(machine, 2500.0), Hungry(machine, 0.0), Working(machine, 2300.0)
    choice_timing.time_on_gpu([aten], [hungry, steady])
    times = [choice.benchmark() for choice in (aten, hungry, steady)]
    assert times[2] < times[1] < times[0]


def test_a_request_takes_turns_too_within_the_time_that_a_user_allows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    seen: list[tuple[float, bool]] = []

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        held.append(True)
        yield
        held.pop()

    def measure(*_: Callable[[], object], longest_ms: float, load_ms: float) -> tuple[float, float]:
        seen.append((longest_ms, bool(held)))
        return 1.0, 2.0

    class Short(Request):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
            return float(benchmarking.benchmarker.benchmark_gpu(lambda: None, rep=3))

    monkeypatch.setattr(benchmarking, "maybe_gpu_benchmark_lock", lock, raising=False)
    monkeypatch.setattr(gpu_times, "measure_in_turns_ms", measure)
    aten, kernel = Working(machine, 2500.0), Choice(Short())
    choice_timing.time_on_gpu([aten], [kernel])
    first = aten.benchmark()
    assert kernel.benchmark(out=torch.empty(1)) / first == 0.5
    assert seen == [(3.0, True)]


def test_a_long_kernel_of_tritons_takes_other_tensors_and_no_turns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(Request):
        def benchmark(self, *tensors: torch.Tensor, out: torch.Tensor | None = None) -> float:
            call = functools.partial(machine.run, host_us=20.0, gpu_us=2500.0)
            return float(benchmarking.benchmarker.benchmark_gpu(call))

    monkeypatch.delattr(gpu_times, "measure_in_turns_ms")
    triton, kernel = Choice(Long()), Working(machine, 2300.0)
    choice_timing.time_on_gpu([triton], [kernel])
    first = triton.benchmark(out=torch.empty(1))
    assert kernel.benchmark() / first == pytest.approx(0.92, rel=0.002)


def test_a_kernel_of_inductors_takes_other_tensors_and_is_not_timed_again(
    timer: list[float],
) -> None:
    triton, kernel = Choice(Request()), Repeated("kernel", [400.0])
    choice_timing.time_on_gpu([triton], [kernel])
    triton.benchmark(out=torch.empty(1))
    assert kernel.benchmark() == 0.4
    assert len(timer) == 1


def test_kernels_alone_are_compared_by_their_time_on_the_gpu(timer: list[float]) -> None:
    """Inductor's choices failed, as where Triton's kernels need too much shared memory."""

    def fail() -> float:
        raise RuntimeError("out of resources")

    failing = SimpleNamespace(benchmark=fail)
    kernel = Launched("kernel", 6.0, 9.0)
    choice_timing.time_against_inductor([failing], [kernel])
    with pytest.raises(RuntimeError, match="resources"):
        failing.benchmark()
    assert kernel.benchmark() == 9e-3


def test_all_choices_of_a_gemm_that_kernels_join_are_timed_on_the_gpu(
    inductor: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, a layout that says it is on a GPU is the nearest to one."""
    from nvgemm_runtime.inductor import hook

    seen: list[list[str]] = []
    on_equal_terms = hook.time_fairly

    def on_a_gpu(choices: list[Any]) -> list[Any]:
        layout = SimpleNamespace(device=torch.device("cuda"))
        return [SimpleNamespace(layout=layout, name=choice.name) for choice in choices]

    def as_on_a_gpu(others: list[Any], kernels: list[Any]) -> list[Any]:
        on_equal_terms(on_a_gpu(others), on_a_gpu(kernels))
        return [*others, *kernels]

    monkeypatch.setattr(
        hook,
        "time_on_gpu",
        lambda *groups: seen.append([one.name[:6] for group in groups for one in group]),
    )
    monkeypatch.setattr(hook, "time_fairly", as_on_a_gpu)
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    inductor.compile(lambda a, b: a @ b, a, b)
    inductor.compile(lambda a, b: a.double() @ b.double(), a, b)
    assert seen == [["mm", "nvgemm"]], "ATen's beside a bundled one; nothing where no kernel joins"


@pytest.mark.parametrize(
    ("backends", "settings", "variable", "way"),
    [
        ("ATEN", {}, "", "on_gpu"),
        ("ATEN,TRITON", {}, "", "beside_inductor"),
        ("ATEN,TRITON", {}, "0", "beside_inductor"),
        ("ATEN,TRITON", {"triton.cudagraphs": True}, "", "on_gpu"),
        ("ATEN,TRITON", {}, "1", "on_gpu"),
        ("ATEN,TRITON", {"autotune_in_subproc": True}, "", "on_gpu"),
        ("ATEN,TRITON", {"pipeline_max_autotune_gemm": True}, "", "on_gpu"),
        ("ATEN,TRITON,CUTLASSTemplateCaller", {}, "", "on_gpu"),
    ],
)
def test_launches_count_where_choices_differ_in_them_and_the_program_may_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
    backends: str,
    settings: dict[str, Any],
    variable: str,
    way: str,
) -> None:
    importlib.import_module("torch._inductor.select_algorithm")  # it imports the plug-in in order
    from nvgemm_runtime.inductor import hook

    seen: list[str] = []
    monkeypatch.setattr(hook, "time_on_gpu", lambda *_: seen.append("on_gpu"))
    monkeypatch.setattr(hook, "time_against_inductor", lambda *_: seen.append("beside_inductor"))
    monkeypatch.setattr(
        hook, "backends_beside_aten", lambda choices: {one.kind for one in choices} - {"ATEN"}
    )
    if variable:
        monkeypatch.setenv("NVGEMM_AOT_CUDA_GRAPHS", variable)
    layout = SimpleNamespace(device=torch.device("cuda"))
    others = [SimpleNamespace(layout=layout, kind=kind) for kind in backends.split(",")]
    with config.patch(settings):
        hook.time_fairly(others, [SimpleNamespace(layout=layout)])
    assert seen == [way]
