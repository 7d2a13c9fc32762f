"""Batches of kernels on their way to a Dask worker, and its answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compiler import Failure, Task

_ANSWER_SECONDS = 30.0
"""Longest time to read an answer that is there, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tasks with the same device code, and how many workers ended while they had them."""

    tasks: tuple[Task, ...]
    deaths: int = 0


@dataclass(kw_only=True, eq=False)
class Batch:
    """Groups that one worker has. ``future`` is the scheduler's; ``is_done`` if it was handled."""

    groups: Sequence[Group]
    future: Any = None
    is_done: bool = False

    @property
    def tasks(self) -> list[Task]:
        """The tasks of all groups, in order."""
        return [task for group in self.groups for task in group.tasks]


@dataclass(kw_only=True, eq=False)
class Member:
    """A worker process. It is usable once it was checked, unless there is a reason against it."""

    address: str
    threads: int
    is_running: bool
    is_checked: bool = False
    reason: str | None = None
    check: Any = None
    batches: set[Batch] = field(default_factory=set)

    @property
    def is_usable(self) -> bool:
        """True if it can get kernels now."""
        return self.is_checked and self.reason is None and self.is_running


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A batch's answer: results in task order, or why the worker cannot go on, or both.

    Neither means that the worker ended.
    """

    results: Sequence[dict[str, Any]] = ()
    reason: str | None = None
    seconds: float | None = None

    @property
    def is_death(self) -> bool:
        """True if the worker ended without an answer."""
        return not self.results and self.reason is None


def results_of(batch: Batch, answer: Answer) -> Iterator[tuple[Task, dict[str, Any] | None]]:
    """Yields each task with its result, or None if the worker gave none."""
    yield from itertools.zip_longest(batch.tasks, answer.results)


def successes(batch: Batch, answer: Answer) -> Iterator[tuple[Task, dict[str, Any] | None]]:
    """Yields the tasks that compiled, or may have before the worker ended."""
    for task, result in results_of(batch, answer):
        if (result is None and answer.is_death) or (result and result["failure"] is None):
            yield task, result


def was_there(result: dict[str, Any] | None) -> bool:
    """Returns True if the worker's cache had the kernel."""
    return result is not None and bool(result["was_there"])


def failure_of(task: Task, result: dict[str, Any]) -> Failure:
    """Returns the failure that a worker reports."""
    return Failure(
        task=task, reason=str(result["failure"]), is_transient=bool(result["is_transient"])
    )


def read_answer(future: Any) -> dict[str, Any] | None:
    """Returns a future's answer, with a reason if it failed; None if its worker ended."""
    from distributed.scheduler import KilledWorker

    if future is None or future.status not in ("finished", "error"):
        return None
    try:
        if future.status == "finished":
            answer: dict[str, Any] = json.loads(future.result(timeout=_ANSWER_SECONDS))
            return answer
        error = future.exception(timeout=_ANSWER_SECONDS)
    except Exception:  # the worker ended before its answer could be read
        return None
    if isinstance(error, KilledWorker):
        return None
    if isinstance(error, ModuleNotFoundError):
        return {"reason": f"nvgemm-aot of this release is not installed there: {error}"}
    return {"reason": f"{type(error).__name__}: {error}"}
