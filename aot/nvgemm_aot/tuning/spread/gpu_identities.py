"""GPU identities, by which parts of a tuning are refused before anything is measured."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from nvgemm_runtime.errors import TuningError

from ..child import Reports
from ..measuring.gpu import Bench
from ..tune_bundles import PROGRAM
from ..watchdog import HANG_S, ProcessEnd, WatchedProcess


@dataclass(frozen=True, kw_only=True)
class GpuIdentity:
    """GPU and software of a measuring process.

    Attributes:
        product: GPU product, as its driver names it.
        uuid_sha256: Digest of the GPU's UUID; None if unknown.
    """

    product: str
    driver: str
    torch: str
    cuda: str
    program: str
    uuid_sha256: str | None


@dataclass(frozen=True, kw_only=True)
class IdentityTask:
    """Task that returns its bench's identity."""

    bench: str
    log_level: int

    def perform(self, bench: Bench, reports: Reports) -> GpuIdentity:
        """Returns the identity."""
        return GpuIdentity(
            product=bench.facts.name,
            driver=bench.watch.driver,
            torch=bench.versions.torch,
            cuda=bench.versions.cuda,
            program=PROGRAM,
            uuid_sha256=bench.conditions.gpu_sha256,
        )


def identify(
    bench: str,
    *,
    gpu: str | None = None,
    hang_s: float = HANG_S,
    stop: threading.Event | None = None,
) -> GpuIdentity:
    """Returns a GPU's identity, from a process that ends then.

    Args:
        bench: Function that creates the bench, as ``module:function``.
        gpu: Value of CUDA_VISIBLE_DEVICES for the process; None for this process's.
        hang_s: As for `watchdog.tune_watched`.
        stop: Interrupts the process once it is set.

    Raises:
        NvgemmError: If the GPU cannot be used.
    """
    task = IdentityTask(bench=bench, log_level=logging.getLogger().getEffectiveLevel())
    with contextlib.closing(WatchedProcess(task, gpu=gpu)) as process:
        end = process.watch(hang_s, {}, stop)
    if isinstance(end, ProcessEnd):
        raise TuningError(f"the GPU cannot be used: {end.text}; run: nvgemm-aot doctor")
    return end


_COMPARED = {
    "product": "GPU",
    "driver": "driver",
    "torch": "torch",
    "cuda": "CUDA",
    "program": "program",
}


def refuse_unlike(identities: Mapping[str, GpuIdentity], *, confirms: int) -> None:
    """Refuses GPUs that cannot share a tuning.

    Args:
        identities: Identities by the name that messages use, such as ``GPU 0``.
        confirms: Number of GPUs to measure each problem on.

    Raises:
        TuningError: If two differ in product or software, two names mean one GPU, there are too few
            to confirm, or a GPU that is to confirm has no known UUID.
    """
    for (first, one), (second, other) in itertools.combinations(identities.items(), 2):
        for attribute, label in _COMPARED.items():
            values = getattr(one, attribute), getattr(other, attribute)
            if values[0] != values[1]:
                raise TuningError(
                    f"{first} and {second} cannot share a tuning: {label} is {values[0]} on the "
                    f"first and {values[1]} on the second; tune them one by one into outputs of "
                    "their own, and join these by: nvgemm-aot rankings export"
                )
        if one.uuid_sha256 is not None and one.uuid_sha256 == other.uuid_sha256:
            raise TuningError(
                f"{first} and {second} are one GPU (UUID digest {one.uuid_sha256[:12]}), whose "
                "measurements would disturb each other; name each GPU once"
            )
    unknown = [name for name, one in identities.items() if one.uuid_sha256 is None]
    if confirms > 1 and unknown:
        raise TuningError(
            f"{unknown[0]}: its UUID is unknown, so it cannot confirm another GPU; tune without "
            "--confirm, or leave this GPU out"
        )
    if len(identities) < confirms:
        raise TuningError(
            f"--confirm {confirms} needs {confirms} GPUs or more (got {len(identities)}: "
            f"{', '.join(identities)})"
        )
