"""Deals kernels to the workers of a Dask scheduler; kernels come back through the remote cache.

Each batch is given to one worker by address, so workers that cannot compile for this build get
none, and a kernel that ends its worker is not tried on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nvgemm_runtime.errors import ExecutorError
from nvgemm_runtime.settings import (
    POLICY_VARIABLE,
    REMOTE_CACHE_TRUST_VARIABLE,
    REMOTE_CACHE_VARIABLE,
)

from ...storage.build_cache import Cache
from ...storage.remote.remote_cache import RemoteCache
from ..cache_entries.remote_kernels import fetch_kernels
from ..compiler import Task, TaskOutcome, TaskResult, group_by_device_code
from ..compiler_limits import compile_limit_seconds
from ..workers import WorkerDied
from .batches import Answer, Batch, Group, failure_of, read_answer, results_of, successes
from .event_queue import Event, EventQueue
from .fleet import CONTINUE, Fleet, Member
from .fleet_worker import Request, compile_batch
from .worker_facts import kinds_of

MAX_WORKER_DEATHS = 3
"""Dask workers that may end while they have a kernel, before it counts as one that failed."""

_PATIENCE_SECONDS = 120.0
"""Longest time without any worker that can compile, in seconds: new machines take a minute."""

_TICK_SECONDS = 0.2

_BATCH_SECONDS = 3.0
"""Duration of a batch: long beside the scheduler's milliseconds, and a short wait at the end."""

_USUAL_KERNEL_SECONDS = 0.6
"""Compile time of a kernel, until this build has measured it."""

_MOST_BATCH_KERNELS = 64

_BATCHES_PER_THREAD = 2
"""Batches that a worker's thread has at once: one in work, and one so that it need not wait."""


class DaskWorkers:
    """Workers of a Dask scheduler as the workers of a build; see `KernelWorkers`.

    Args:
        client: A ``distributed.Client``.
        remote: Remote cache through which kernels come.
        cache: Build cache into which they are fetched.
        patience_seconds: Longest time without any worker that can compile.

    Raises:
        ExecutorError: If nothing can be read from the remote cache.
    """

    def __init__(
        self,
        client: Any,
        remote: RemoteCache | None,
        cache: Cache,
        *,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._client = client
        self._remote = require_remote(remote)
        self._cache = cache
        self._patience_seconds = patience_seconds

    def run(self, items: Sequence[Task], /) -> Iterator[TaskOutcome]:
        """Runs all tasks; see `Workers.run`. Whatever is queued is cancelled at the end.

        Raises:
            ExecutorError: If the scheduler is lost, or no worker can compile.
        """
        run = _Run(self._client, self._remote, self._cache, items, self._patience_seconds)
        try:
            yield from run.outcomes()
        finally:
            run.release()


def require_remote(remote: RemoteCache | None) -> RemoteCache:
    """Requires a remote cache whose entries this process takes.

    Raises:
        ExecutorError: If there is none, with the variables to set.
    """
    if remote is None:
        raise ExecutorError(
            "an executor's kernels come through a cache that its workers and this machine share: "
            f"set {REMOTE_CACHE_VARIABLE} here and on the workers, as to s3://bucket/prefix"
        )
    if not remote.trust.reads:
        raise ExecutorError(
            "an executor's kernels come through the remote cache, of which nothing is taken here: "
            f"set {POLICY_VARIABLE} to a policy with the workers' keys, or "
            f"{REMOTE_CACHE_TRUST_VARIABLE}=1 to trust everyone who can write the store"
        )
    return remote


class _Run:
    """One run: what waits, and what is on its way.

    Only the thread that iterates over `outcomes` changes this state and the fleet's. Other threads
    wait for the scheduler and the remote cache, and queue events.
    """

    def __init__(
        self,
        client: Any,
        remote: RemoteCache,
        cache: Cache,
        tasks: Sequence[Task],
        patience_seconds: float,
    ) -> None:
        self._remote = remote
        self._cache = cache
        self._address = client.scheduler.address
        self._patience_seconds = patience_seconds
        self._events = EventQueue()
        self._fleet = Fleet(client, remote, cache, kinds_of(tasks), self._events, patience_seconds)
        groups = group_by_device_code(sorted(tasks, key=lambda task: str(task.process_kind)))
        self._waiting = deque(Group(tasks=group) for group in groups)
        self._left = len(tasks)
        self._kernel_seconds = _USUAL_KERNEL_SECONDS
        self._limit_seconds = compile_limit_seconds()

    def outcomes(self) -> Iterator[TaskOutcome]:
        """Yields each task with its result, as they come."""
        while self._left:
            for member in self._fleet.refresh():
                self._lose(member)
            self._take_back()
            self._fleet.require_worker()
            self._deal()
            with contextlib.suppress(queue.Empty):
                for outcome in self._events.get(timeout=_TICK_SECONDS)():
                    self._left -= 1
                    yield outcome

    def release(self) -> None:
        """Gives up what is queued; workers finish and store the batches that they have begun."""
        for member in self._fleet.members.values():
            for future in (member.check, *(batch.future for batch in member.batches)):
                if future is not None:
                    future.release()

    def _take_back(self) -> None:
        """Lets others compile what workers have that no longer answer.

        A paused worker begins nothing. One that runs is refused once all kernels of its batches
        must have met the time limit: it may be busy with other work.
        """
        now = time.monotonic()
        for member in self._fleet.members.values():
            if not member.batches:
                continue
            seconds = self._patience_seconds
            if member.is_running:
                most = max(len(batch.tasks) for batch in member.batches)
                seconds += most * self._limit_seconds
            if now < member.heard_seconds + seconds:
                continue
            if member.is_running:
                self._fleet.refuse(
                    member, f"it has answered nothing for {seconds:g} s: is it busy?"
                )
            for batch in member.batches:
                batch.is_done = True
                batch.future.release()
                self._waiting.extendleft(reversed(batch.groups))
            member.batches.clear()

    def _deal(self) -> None:
        """Gives batches to the workers that have room, those with the fewest first."""
        usable = [member for member in self._fleet.members.values() if member.is_usable]
        threads = sum(member.threads for member in usable)
        while self._waiting and usable:
            member = min(usable, key=lambda member: len(member.batches) / member.threads)
            if len(member.batches) >= _BATCHES_PER_THREAD * member.threads:
                return
            self._send(member, self._next_batch(threads))

    def _next_batch(self, threads: int) -> Batch:
        """Takes groups of one kind for a batch: smaller ones towards the end, so that all end."""
        fitting = round(_BATCH_SECONDS / self._kernel_seconds)
        most = min(fitting, _MOST_BATCH_KERNELS, -(-len(self._waiting) // (2 * threads)))
        first = self._waiting.popleft()
        groups, kernels = [first], len(first.tasks)
        while self._waiting and not first.deaths:
            following = self._waiting[0]
            kernels += len(following.tasks)
            is_alike = following.tasks[0].process_kind == first.tasks[0].process_kind
            if following.deaths or kernels > most or not is_alike:
                break
            groups.append(self._waiting.popleft())
        return Batch(groups=groups)

    def _send(self, member: Member, batch: Batch) -> None:
        groups = tuple(group.tasks for group in batch.groups)
        request = pickle.dumps(Request(groups=groups, facts=self._fleet.facts))
        batch.future = self._fleet.submit(compile_batch, request, member)
        if not member.batches:
            member.heard_seconds = time.monotonic()
        member.batches.add(batch)
        self._events.put_when_done(
            batch.future, functools.partial(self._collect_batch, member, batch)
        )

    def _collect_batch(self, member: Member, batch: Batch, future: Any) -> Event:
        answer = read_answer(future, len(batch.tasks)) or Answer()
        there = self._fetch(task for task, _ in successes(batch, answer))
        return functools.partial(self._on_answer, member, batch, answer, there)

    def _fetch(self, tasks: Iterable[Task]) -> frozenset[str]:
        """Fetches kernels; returns the keys of those that came."""
        return fetch_kernels({task.key: task.expected for task in tasks}, self._cache, self._remote)

    def _lose(self, member: Member) -> None:
        """Handles the batches of a worker that is gone."""
        for batch in member.batches:
            self._events.put(functools.partial(self._collect_batch, member, batch, None))

    def _on_answer(
        self, member: Member, batch: Batch, answer: Answer, there: frozenset[str]
    ) -> Iterator[TaskOutcome]:
        """Yields the results of a batch; lets the rest wait for another worker."""
        if batch.is_done:
            return
        batch.is_done = True
        member.batches.discard(batch)
        member.heard_seconds = time.monotonic()
        batch.future.release()
        if answer.seconds is not None and answer.results:
            self._kernel_seconds += (max(answer.seconds, 0.001) - self._kernel_seconds) / 4
        results = {task.key: result for task, result in results_of(batch, answer)}
        succeeded = {task.key for task, _ in successes(batch, answer)}
        lost: list[Group] = []
        for group in batch.groups:
            missing = []
            for task in group.tasks:
                result = results[task.key]
                if task.key in there:
                    yield (
                        task,
                        TaskResult(was_there=bool(result and result.was_there), is_shared=True),
                    )
                elif task.key in succeeded or result is None:
                    missing.append(task)
                else:
                    yield task, TaskResult(failure=failure_of(task, result))
            if missing:
                lost.append(Group(tasks=tuple(missing), deaths=group.deaths))
        if answer.is_death:
            yield from self._count_deaths(member, lost, is_alone=len(batch.groups) == 1)
            return
        if answer.reason is not None:
            self._fleet.refuse(member, answer.reason)
        elif lost:
            self._cache.require_writable()
            self._fleet.refuse(member, "kernels that it compiled do not arrive in the remote cache")
        if lost and (off := self._remote.statistics.off):
            raise ExecutorError(
                f"executor {self._address}: kernels cannot be fetched: the remote cache "
                f"{self._remote.address} was given up: {off}; {CONTINUE}"
            )
        self._waiting.extendleft(reversed(lost))

    def _count_deaths(
        self, member: Member, groups: Sequence[Group], *, is_alone: bool
    ) -> Iterator[TaskOutcome]:
        """Lets groups wait for another worker, or gives up one that ended several workers."""
        for group in groups:
            deaths = group.deaths + 1
            if is_alone and deaths >= MAX_WORKER_DEATHS:
                text = f"with {deaths} workers of the executor, the last {member.address}"
                for task in group.tasks:
                    yield task, WorkerDied(text)
            else:
                self._waiting.append(Group(tasks=group.tasks, deaths=deaths))
