"""What could disturb a measurement on a GPU, as the driver's management library (NVML) tells it."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

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
