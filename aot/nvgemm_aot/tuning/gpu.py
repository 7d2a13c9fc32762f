"""The GPU that tuning measures on: its timer, its clocks and load as NVML reports them."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nvgemm_runtime.bundle.format import Conditions
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions, device_facts, torch_versions

from .race import Sample, Timer

if TYPE_CHECKING:
    import torch

UNKNOWN_DRIVER = "unknown"
"""In place of the driver's version where the library is not there."""

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Reasons for low clocks, by NVML's bits (nvml.h, nvmlClocksEventReasons). The cap on power, 0x04,
is not among them: large GEMMs run into it on every GPU, in a measurement as in use."""

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU at one moment.

    Attributes:
        utilization_percent: Share of the last second or less in which a kernel ran; None where it
            is not known.
        slowdowns: What holds its clocks down, in words; None where it is not known.
    """

    utilization_percent: int | None
    slowdowns: tuple[str, ...] | None


class Watch(Protocol):
    """Looks at one GPU."""

    @property
    def driver(self) -> str:
        """Version of its driver."""

    def look(self) -> GpuState:
        """How it is now."""


class Blind:
    """For machines without the library: sees nothing."""

    driver = UNKNOWN_DRIVER

    def look(self) -> GpuState:
        """Nothing is known."""
        return GpuState(utilization_percent=None, slowdowns=None)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class NvmlWatch:
    """Looks at a GPU by NVML.

    Args:
        uuid: Of the GPU, e.g. ``GPU-8b1c…``.

    Raises:
        OSError: If the library is not there, or does not know the GPU.
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
        """How it is now, as far as NVML tells."""
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
    """Look at a GPU, as well as this machine allows."""
    try:
        return NvmlWatch(uuid)
    except OSError:
        return Blind()


GRAPH_NS = 2_000_000
"""Launches are repeated in one graph until it runs about this long: starting a graph and reading
events, some microseconds, are then lost in it."""

MOST_LAUNCHES = 512
"""In one graph; even launches that compute nothing are not quicker than about a microsecond."""

BUFFERS_OVER_L2 = 4
"""Operands take turns until they are this many times as large as the L2 cache."""


class GpuTimer:
    """Times calls on the current CUDA device. Clocks stay as they are.

    The host is not measured: launches are captured once into a CUDA graph, whose replays are timed.
    """

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Sample:
        """See `race.Timer`."""
        for call in calls[:3]:  # loads device code, and lets libraries choose their kernels
            call()
        once = min(_elapsed_ns(call) for call in calls[:2] for _ in range(2))
        count = _launches(once)
        graph = _capture(calls, count)
        # A launch by itself waits for the host: launches of a graph tell what one really takes.
        in_graph = _launches(min(_elapsed_ns(graph.replay) for _ in range(2)) / count)
        if in_graph > 2 * count:
            count = in_graph
            graph = _capture(calls, count)
            graph.replay()
        return lambda: _elapsed_ns(graph.replay) / count

    def check(self) -> None:
        """See `race.Timer`."""
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
    """What operands must take together, so that none is found in the current device's L2."""
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
    """Where is measured, and by what; the only part that knows which device it is.

    Attributes:
        facts: The device.
        device: It, as torch names it.
        versions: Of torch.
        timer: Times calls.
        watch: Looks for what disturbs.
        buffer_bytes: What operands must take together, so that no cache holds them.
        sleep: Waits so many seconds.
        today: The day in UTC, e.g. ``2026-11-21``.
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
        """What a measurement made now depends on."""
        return Conditions(
            driver=self.watch.driver,
            torch=self.versions.torch,
            cuda=self.versions.cuda,
            date=self.today(),
        )


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
