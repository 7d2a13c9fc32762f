"""GPU that tuning measures on: its timer, and the disturbances that NVML reports."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.bundle.ranking_entries import APART, Conditions
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions, device_facts, torch_versions

from .race import Sample, Timer

if TYPE_CHECKING:
    import torch

UNKNOWN_DRIVER = "unknown"
"""Driver version recorded if NVML is missing."""

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Reasons for low clocks, by NVML bit (nvml.h, nvmlClocksEventReasons). The power cap, 0x04, is
left out: large GEMMs reach it on every GPU, also in production."""

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """GPU state at one moment; None for unknown values.

    Attributes:
        utilization_percent: Share of the last second or less in which a kernel ran.
        slowdowns: Reasons for low clocks, in words.
    """

    utilization_percent: int | None = None
    slowdowns: tuple[str, ...] | None = None


class Watch:
    """Reports a GPU's state. The base class reports nothing and is used without NVML."""

    driver = UNKNOWN_DRIVER

    def look(self) -> GpuState:
        """Returns the GPU's current state."""
        return GpuState()


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class NvmlWatch(Watch):
    """Reports a GPU's state by its UUID, e.g. ``GPU-8b1c…``, through NVML.

    Raises:
        OSError: If NVML is missing or does not know the GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        version = ctypes.create_string_buffer(80)
        self._call("nvmlSystemGetDriverVersion", version, ctypes.c_uint(len(version)))
        self.driver = version.value.decode()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} of {_LIBRARY} returned {status}")

    def look(self) -> GpuState:
        """Returns the GPU's current state, as far as NVML reports it."""
        utilization, reasons = _Utilization(), ctypes.c_ulonglong()
        percent, words = None, None
        with contextlib.suppress(OSError, AttributeError):  # a GPU partition reports none
            self._call("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(utilization))
            percent = int(utilization.gpu)
        with contextlib.suppress(OSError, AttributeError):
            self._call(
                "nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons)
            )
            words = slowdowns(reasons.value)
        return GpuState(utilization_percent=percent, slowdowns=words)


def slowdowns(reasons: int) -> tuple[str, ...]:
    """Returns the `SLOWDOWNS` among NVML's reasons for low clocks."""
    return tuple(words for bit, words in SLOWDOWNS.items() if reasons & bit)


def watch_gpu(uuid: str) -> Watch:
    """Returns a watch for a GPU; it reports nothing if NVML is missing."""
    try:
        return NvmlWatch(uuid)
    except OSError:
        return Watch()


GRAPH_NS = 2_000_000
"""Target runtime of a graph's launches, long enough to hide the microseconds spent on starting it
and reading events."""

MOST_LAUNCHES = 512
"""Most launches in a graph; even an empty kernel takes about a microsecond."""

BUFFERS_OVER_L2 = 4
"""Total operand size, as a multiple of the L2 cache."""


_BETWEEN_VALUES = 1024
"""fp32 values that the spacer kernel between two launches adds to: one thread block, 4 KB of L2."""

_BETWEEN_SAMPLES = 15
"""Samples for the spacer kernel alone; a timer subtracts their median from all its times."""


class GpuTimer:
    """Times calls on the current CUDA device, at its present clock settings.

    Launches are captured once into a CUDA graph and replays are timed, which excludes host time.
    For launches apart, a small torch kernel precedes each launch. It has no programmatic dependent
    launch, so it begins after the GEMM before it has ended. It does not signal early, so the GEMM
    after it begins when it has ended. Its own time, launch included, is measured once and
    subtracted from all contenders alike.

    Args:
        graph_ns: Target runtime of a graph's launches.
    """

    def __init__(self, graph_ns: int = GRAPH_NS) -> None:
        self._graph_ns = graph_ns
        self._between: Callable[[], object] | None = None
        self._between_ns = 0.0

    def prepare(self, calls: Sequence[Callable[[], object]], *, launches: str = APART) -> Sample:
        """Captures the calls in turn."""
        for call in calls[:3]:  # loads device code; libraries choose their kernels
            call()
        between, between_ns = None, 0.0
        if launches == APART:
            between, between_ns = self._prepare_between()
        once = min(_elapsed_ns(call) for call in calls[:2] for _ in range(2))
        count = _launch_count(once, self._graph_ns)
        graph = _capture(calls, count, between)
        # A single launch waits for the host; only launches within a graph show the true time.
        in_graph = _launch_count(
            min(_elapsed_ns(graph.replay) for _ in range(2)) / count - between_ns, self._graph_ns
        )
        if in_graph > 2 * count:
            count = in_graph
            graph = _capture(calls, count, between)
            graph.replay()
        return lambda: max(_elapsed_ns(graph.replay) / count - between_ns, 1.0)

    def _prepare_between(self) -> tuple[Callable[[], object], float]:
        """Returns the spacer kernel and its time when launched in a row."""
        if self._between is None:
            between = small_kernel()
            between()
            graph = _capture([between], MOST_LAUNCHES)
            samples = [_elapsed_ns(graph.replay) for _ in range(2 * _BETWEEN_SAMPLES)]
            # The first ones bring an idle GPU to its clocks.
            self._between_ns = statistics.median(samples[_BETWEEN_SAMPLES:]) / MOST_LAUNCHES
            self._between = between
        return self._between, self._between_ns

    def check(self) -> None:
        """Waits for the device, which raises its error."""
        import torch

        torch.cuda.synchronize()


def _launch_count(launch_ns: float, graph_ns: int) -> int:
    """Returns an even launch count: for groups, every second operand set has the other routing."""
    return 2 * max(1, min(MOST_LAUNCHES // 2, int(graph_ns / 2 / max(launch_ns, 1.0))))


def small_kernel(device: str = "cuda") -> Callable[[], object]:
    """Returns a call that launches a small kernel, the spacer for launches apart."""
    import torch

    values = torch.zeros(_BETWEEN_VALUES, dtype=torch.float32, device=device)
    return lambda: values.add_(1.0)


def _capture(
    calls: Sequence[Callable[[], object]],
    count: int,
    between: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            if between is not None:
                between()
            call()
    return graph


def buffer_bytes() -> int:
    """Returns the bytes that operands need together to evict each other from the L2 cache."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return BUFFERS_OVER_L2 * int(properties.L2_cache_size)


def _elapsed_ns(call: Callable[[], object]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measuring device, and everything that depends on its kind.

    Attributes:
        device: Device name in torch.
        watch: Reports disturbances.
        buffer_bytes: Bytes that operands need together so that no cache holds them.
        sleep: Waits for some seconds.
        today: Returns the UTC date, e.g. ``2026-11-21``.
        uuid: GPU UUID as NVML writes it, ``GPU-8b1c…``; None if unknown.
        now_s: Returns seconds on a clock that processes share.
    """

    facts: DeviceFacts
    device: str
    versions: TorchVersions
    timer: Timer
    watch: Watch
    buffer_bytes: int
    sleep: Callable[[float], None]
    today: Callable[[], str]
    uuid: str | None = None
    now_s: Callable[[], float] = time.time

    @property
    def conditions(self) -> Conditions:
        """Conditions for a measurement made now."""
        return Conditions(
            driver=self.watch.driver,
            torch=self.versions.torch,
            cuda=self.versions.cuda,
            date=self.today(),
            launches=APART,
            gpu_sha256=None if self.uuid is None else uuid_digest(self.uuid),
        )


def uuid_digest(uuid: str) -> str:
    """Returns a UUID's digest: bundles and rankings tell GPUs apart but name none."""
    return hashlib.sha256(uuid.encode()).hexdigest()


def gpu_bench() -> Bench:
    """Returns the bench for torch's current CUDA device.

    Raises:
        TuningError: If torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise TuningError(
            f"torch {torch.__version__} sees no GPU, which tuning needs; run: nvgemm-aot doctor"
        )
    index = torch.cuda.current_device()
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return Bench(
        facts=device_facts("cuda", index),
        device=f"cuda:{index}",
        versions=torch_versions(),
        timer=GpuTimer(),
        watch=watch_gpu(uuid),
        buffer_bytes=buffer_bytes(),
        sleep=time.sleep,
        today=lambda: datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        uuid=uuid,
    )
