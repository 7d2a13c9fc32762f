"""The GPU that tuning measures on: a timer, and the disturbances that NVML reports."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.bundle.format import Conditions
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions, device_facts, torch_versions

from .race import Sample, Timer

if TYPE_CHECKING:
    import torch

UNKNOWN_DRIVER = "unknown"
"""Stands for the driver's version where NVML is missing."""

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Reasons for low clocks, by NVML's bits (nvml.h, nvmlClocksEventReasons). The power cap, 0x04, is
missing on purpose: large GEMMs reach it on every GPU, also in production."""

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU at one moment; None where something is unknown.

    Attributes:
        utilization_percent: Share of the last second or less in which a kernel ran.
        slowdowns: What holds its clocks down, in words.
    """

    utilization_percent: int | None = None
    slowdowns: tuple[str, ...] | None = None


class Watch:
    """Reports a GPU's state; this one, which stands in where NVML is missing, knows nothing."""

    driver = UNKNOWN_DRIVER

    def look(self) -> GpuState:
        """The GPU's state now."""
        return GpuState()


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class NvmlWatch(Watch):
    """Reports the state of the GPU of a UUID, e.g. ``GPU-8b1c…``, by NVML.

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
        """The GPU's state now, as far as NVML reports it."""
        utilization, reasons = _Utilization(), ctypes.c_ulonglong()
        percent, words = None, None
        with contextlib.suppress(OSError, AttributeError):  # a partition of a GPU has none
            self._call("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(utilization))
            percent = int(utilization.gpu)
        with contextlib.suppress(OSError, AttributeError):
            self._call(
                "nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons)
            )
            words = slowdowns(reasons.value)
        return GpuState(utilization_percent=percent, slowdowns=words)


def slowdowns(reasons: int) -> tuple[str, ...]:
    """The `SLOWDOWNS` among NVML's reasons for low clocks."""
    return tuple(words for bit, words in SLOWDOWNS.items() if reasons & bit)


def watch_gpu(uuid: str) -> Watch:
    """Watch a GPU by NVML, or by nothing where that is missing."""
    try:
        return NvmlWatch(uuid)
    except OSError:
        return Watch()


GRAPH_NS = 2_000_000
"""A graph repeats launches until it runs about this long, so that the microseconds of starting it
and of reading events do not matter."""

MOST_LAUNCHES = 512
"""Most launches in one graph; even an empty kernel takes about a microsecond."""

BUFFERS_OVER_L2 = 4
"""Operands together take this many times the size of the L2 cache."""


class GpuTimer:
    """Times calls on the current CUDA device, at its present clock settings.

    Launches are captured once into a CUDA graph and its replays timed, so that host time is
    excluded.
    """

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Sample:
        """Capture the calls in turn."""
        for call in calls[:3]:  # loads device code, and lets libraries choose their kernels
            call()
        once = min(_elapsed_ns(call) for call in calls[:2] for _ in range(2))
        count = _launches(once)
        graph = _capture(calls, count)
        # A single launch waits for the host; only launches within a graph show the true time.
        in_graph = _launches(min(_elapsed_ns(graph.replay) for _ in range(2)) / count)
        if in_graph > 2 * count:
            count = in_graph
            graph = _capture(calls, count)
            graph.replay()
        return lambda: _elapsed_ns(graph.replay) / count

    def check(self) -> None:
        """Wait for the device, which raises its error."""
        import torch

        torch.cuda.synchronize()


def _launches(launch_ns: float) -> int:
    return max(2, min(MOST_LAUNCHES, int(GRAPH_NS / max(launch_ns, 1.0))))


def _capture(calls: Sequence[Callable[[], object]], count: int) -> torch.cuda.CUDAGraph:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    return graph


def buffer_bytes() -> int:
    """Bytes that operands must take together to evict each other from the device's L2 cache."""
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
    """The device that measurements run on, and everything that depends on its kind.

    Attributes:
        device: The device's name in torch.
        watch: Reports what disturbs a measurement.
        buffer_bytes: Bytes that operands must take together so that no cache holds them.
        sleep: Waits for a number of seconds.
        today: Returns the day in UTC, e.g. ``2026-11-21``.
    """

    facts: DeviceFacts
    device: str
    versions: TorchVersions
    timer: Timer
    watch: Watch
    buffer_bytes: int
    sleep: Callable[[float], None]
    today: Callable[[], str]

    @property
    def conditions(self) -> Conditions:
        """The conditions of a measurement made now."""
        return Conditions(
            driver=self.watch.driver,
            torch=self.versions.torch,
            cuda=self.versions.cuda,
            date=self.today(),
        )


def gpu_bench() -> Bench:
    """The bench of torch's current CUDA device.

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
