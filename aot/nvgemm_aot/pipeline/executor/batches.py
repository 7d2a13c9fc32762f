"""Batches of kernels on their way to a Dask worker, and its answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..compiler import Failure, Task

MALFORMED = "its answer is malformed"

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


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Result(_Checked):
    """A task's result: ``failure`` is None if it compiled."""

    failure: str | None
    is_transient: bool
    was_there: bool


class Answer(_Checked):
    """A worker's answer: results in task order, or why the worker cannot go on, or both.

    Neither means that the worker ended, or that a check found nothing.
    """

    results: list[Result] = []
    reason: str | None = None
    seconds: float | None = None

    @property
    def is_death(self) -> bool:
        """True if the worker ended without an answer."""
        return not self.results and self.reason is None


def results_of(batch: Batch, answer: Answer) -> Iterator[tuple[Task, Result | None]]:
    """Yields each task with its result, or None if the worker gave none."""
    yield from itertools.zip_longest(batch.tasks, answer.results)


def successes(batch: Batch, answer: Answer) -> Iterator[tuple[Task, Result | None]]:
    """Yields the tasks that compiled, or may have before the worker ended."""
    for task, result in results_of(batch, answer):
        if (result is None and answer.is_death) or (result and result.failure is None):
            yield task, result


def failure_of(task: Task, result: Result) -> Failure:
    """Returns the failure that a worker reports."""
    return Failure(task=task, reason=str(result.failure), is_transient=result.is_transient)


def read_answer(future: Any, count: int = 0) -> Answer | None:
    """Returns a future's answer, or None if its worker ended.

    The answer has a reason if the future failed, or if it is anything but ``count`` results, a
    reason, or both.
    """
    from distributed.scheduler import KilledWorker

    if future is None or future.status not in ("finished", "error"):
        return None
    try:
        if future.status == "finished":
            return _checked(future.result(timeout=_ANSWER_SECONDS), count)
        error = future.exception(timeout=_ANSWER_SECONDS)
    except Exception:  # the worker ended before its answer could be read
        return None
    if isinstance(error, KilledWorker):
        return None
    if isinstance(error, ModuleNotFoundError):
        return Answer(reason=f"nvgemm-aot of this release is not installed there: {error}")
    return Answer(reason=f"{type(error).__name__}: {error}")


def _checked(text: object, count: int) -> Answer:
    """Returns the answer that a worker's text holds, or one with a reason if it holds none."""
    try:
        answer = Answer.model_validate_json(text)  # type: ignore[arg-type]
    except (ValidationError, TypeError):
        return Answer(reason=MALFORMED)
    is_whole = len(answer.results) == count or (not answer.results and answer.reason is not None)
    return answer if is_whole else Answer(reason=MALFORMED)
