"""Dask workers with a GPU each: finds them, submits calls to them, and returns results."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ExecutorError, NvgemmError, TuningError, one_line
from nvgemm_runtime.installed.signatures import encode_signatures, read_signatures

from ...pipeline.executor.scheduler_connection import workers_of
from ..watchdog import IDLE_FACTOR
from .gpu_identities import GpuIdentity, refuse_unlike
from .worker_tasks import SentBundle, identify_worker

_log = logging.getLogger(__name__)

SAVED = "measurements are saved beside {}, and the same command continues"

_SLEEP_S = 0.1
"""Pause between looks at a future."""


def _sleep() -> None:
    time.sleep(_SLEEP_S)


class LostError(Exception):
    """A worker is lost."""


@dataclass(kw_only=True)
class Worker:
    """A worker in use: its address, and its future with the bundles."""

    address: str
    bundles: Any


class GpuWorkers:
    """Workers of a scheduler that share a tuning.

    Args:
        client: A ``distributed.Client``.
        output: Bundle to write, for messages.
        bundles: Bundles to tune, which each worker gets.
        bench: Function that creates the bench, as ``module:function``.
        hang_s: As for `watchdog.tune_watched`.

    Attributes:
        in_use: Workers that measure.
    """

    def __init__(
        self, client: Any, output: Path, bundles: Sequence[Bundle], bench: str, hang_s: float
    ) -> None:
        self._client, self._output, self._bundles = client, output, bundles
        self._bench, self._hang_s = bench, hang_s
        self._limit_s = hang_s * IDLE_FACTOR
        self.in_use: list[Worker] = []

    def find(self, confirms: int) -> None:
        """Finds the workers that can measure.

        Raises:
            ExecutorError: If there is none.
            TuningError: If they differ; see `refuse_unlike`.
        """
        found = {
            address: self.submit(address, identify_worker, self._bench, self._hang_s)
            for address in self.addresses()
        }
        identities: dict[str, GpuIdentity] = {}
        refused: list[str] = []
        deadline = time.monotonic() + self._limit_s
        for address, future in found.items():
            try:
                answer = self.result(address, future, deadline=deadline)
            except (LostError, TuningError) as error:
                answer = str(error).removeprefix(f"worker {address}: ")
            if isinstance(answer, GpuIdentity):
                identities[f"worker {address}"] = answer
            else:
                refused.append(f"worker {address}: {answer}")
        if not identities:
            raise ExecutorError(
                f"no worker of {self._client.scheduler.address} can measure "
                f"({'; '.join(refused) or 'it has none'}); start dask worker on machines with GPUs"
            )
        for reason in refused:
            _log.warning("%s; it gets no work", reason)
        refuse_unlike(identities, confirms=confirms)
        sent = [_sent_bundle(bundle) for bundle in self._bundles]
        for name in identities:
            address = name.removeprefix("worker ")
            (bundles,) = self._client.scatter([sent], workers=[address], hash=False)
            self.in_use.append(Worker(address=address, bundles=bundles))

    def submit(self, address: str, function: Any, *arguments: Any) -> Any:
        """Submits a call to one worker; returns its future."""
        return self._client.submit(
            function,
            *arguments,
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )

    def addresses(self) -> list[str]:
        """Returns the workers' addresses.

        Raises:
            ExecutorError: If the scheduler is gone.
        """
        try:
            if self._client.status == "running":
                return sorted(workers_of(self._client))
            reason = f"its connection is {self._client.status}"
        except (OSError, TimeoutError) as error:
            reason = one_line(str(error))
        raise ExecutorError(f"the scheduler was lost ({reason}); {SAVED.format(self._output)}")

    def result(
        self,
        address: str,
        future: Any,
        wait: Callable[[], None] = _sleep,
        deadline: float = math.inf,
    ) -> Any:
        """Waits for a future's result, by calling ``wait`` until it is there.

        Raises:
            LostError: If its worker is lost, or has not answered at the deadline.
            NvgemmError: The task's, or if the scheduler is lost.
        """
        while not future.done():
            if address not in self.addresses():
                self._client.cancel([future], force=True)
                raise LostError("it left the scheduler")
            if time.monotonic() > deadline:
                self._client.cancel([future], force=True)
                raise LostError("it has not answered: is it busy with other work?")
            wait()
        try:
            return self._answer(address, future)
        except (OSError, asyncio.TimeoutError) as error:
            raise LostError(f"its answer does not arrive ({type(error).__name__})") from None

    def _answer(self, address: str, future: Any) -> Any:
        """Returns a done future's result; see `result`."""
        if future.status == "finished":
            return future.result(timeout=self._limit_s)
        if future.status != "error":
            self.addresses()  # names a scheduler that took all workers with it
            raise LostError(f"its task is {future.status}")
        error = future.exception(timeout=self._limit_s)
        if isinstance(error, NvgemmError):
            raise error
        text = f"{type(error).__name__}: {one_line(str(error))}"
        if type(error).__module__.startswith("distributed"):
            raise LostError(text)
        raise TuningError(
            f"worker {address}: {text}; it needs the client's Python, nvgemm-aot and torch, and "
            "the scheduler that Python and nvgemm-aot"
        )


def _sent_bundle(bundle: Bundle) -> SentBundle:
    signatures = read_signatures(bundle.path)
    return SentBundle(
        path=bundle.path.absolute(),
        data=bundle.content(),
        signatures=encode_signatures(signatures) if signatures else None,
    )
