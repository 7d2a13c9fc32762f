"""Kernel time of a request, by who computes it."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.kernel_intervals import NO_KERNEL, Interval, device_intervals, union_ns

MOST_NAMES = 8
"""Kernels that a result names, by their share."""


class Kind(str, enum.Enum):
    """Kernels by what they compute."""

    BUNDLED = "bundled"
    """Bundled GEMMs."""
    GEMM = "gemm"
    """Other GEMMs."""
    ATTENTION = "attention"
    OTHER = "other"


_KINDS = (
    # FlashAttention 3's names have CUTLASS' terms in them.
    (Kind.ATTENTION, re.compile(r"flash|fmha|attention|attn", re.IGNORECASE)),
    (Kind.BUNDLED, re.compile(r"^kernel_cutlass_")),
    # Inductor's own kernels name the operators that they follow, so "mm" alone says nothing.
    (Kind.GEMM, re.compile(r"nvjet|gemm|gemv|xmma|splitk|triton_tem_|cutlass_\d", re.IGNORECASE)),
)
"""Patterns for kernel names; the first that matches counts. The CuTe DSL names bundled kernels."""


def kind_of(name: str) -> Kind:
    """Returns a kernel's kind."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), Kind.OTHER)


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """GPU time of one step.

    Attributes:
        busy_us: Microseconds in which a kernel ran.
        kinds_us: Sum of kernels' microseconds, by `Kind`.
        names_us: The same by kernel name, for the kernels that take most.
    """

    busy_us: float
    kinds_us: dict[str, float]
    names_us: dict[str, float]

    @property
    def served(self) -> float | None:
        """Share of GEMM time that bundled kernels take; None without GEMMs."""
        return share_served(self.kinds_us)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, in tenths of a microsecond."""
        return {
            "busy_us": round(self.busy_us, 1),
            "kinds_us": {name: round(us, 1) for name, us in self.kinds_us.items()},
            "names_us": {name[:160]: round(us, 1) for name, us in self.names_us.items()},
        }


def share_served(kinds_us: dict[str, float]) -> float | None:
    """Returns bundled kernels' share of GEMM time; None without GEMMs."""
    bundled, others = kinds_us.get(Kind.BUNDLED.value, 0), kinds_us.get(Kind.GEMM.value, 0)
    return bundled / (bundled + others) if bundled + others else None


def kernel_time(intervals: Iterable[Interval], steps: int) -> KernelTime:
    """Divides a profile's kernel time by its steps.

    Raises:
        RuntimeError: If the profile holds no kernel.
    """
    found = list(intervals)
    if not found:
        raise RuntimeError(NO_KERNEL)
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for one in found:
        length = one.end_ns - one.begin_ns
        kinds[kind_of(one.name).value] += length
        names[one.name] += length
    unit = 1e3 * steps
    return KernelTime(
        busy_us=union_ns(found) / unit,
        kinds_us={kind.value: kinds[kind.value] / unit for kind in Kind},
        names_us={name: length / unit for name, length in names.most_common(MOST_NAMES)},
    )


def profiled(call: Callable[[], object], steps: int) -> KernelTime:
    """Profiles a call of so many steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return kernel_time(device_intervals(found.profiler.kineto_results.events()), steps)
