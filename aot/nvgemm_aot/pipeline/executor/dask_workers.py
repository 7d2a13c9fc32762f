"""Deals kernels to the workers of a Dask scheduler; kernels come back through the remote cache.

Each batch is given to one worker by address, so workers that cannot compile for this build get
none, and a kernel that ends its worker is not tried on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import pickle
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import Any

from nvgemm_runtime.errors import ExecutorError, count_text, one_line
from nvgemm_runtime.settings import (
    POLICY_VARIABLE,
    REMOTE_CACHE_TRUST_VARIABLE,
    REMOTE_CACHE_VARIABLE,
)

from ...storage.build_cache import Cache, cache_key
from ...storage.remote.remote_cache import RemoteCache
from ...storage.remote.transfers import Transfers
from ..cache_entries.remote_kernels import fetch_kernels
from ..compiler import Task, TaskOutcome, TaskResult, group_by_device_code
from ..compiler_limits import compile_limit_seconds
from ..workers import WorkerDied
from .batches import (
    Answer,
    Batch,
    Group,
    Member,
    failure_of,
    read_answer,
    results_of,
    successes,
)
from .fleet_worker import TRIAL_PAYLOAD, Request, check_worker, compile_batch
from .scheduler_connection import ANSWER_SECONDS, workers_of
from .worker_facts import facts_for, kinds_of

_log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
"""Dask workers that may end while they have a kernel, before it counts as one that failed."""

_PATIENCE_SECONDS = 120.0
"""Longest time without any worker that can compile, in seconds: new machines take a minute."""

_REFRESH_SECONDS = 1.0

_TICK_SECONDS = 0.2

_BATCH_SECONDS = 3.0
"""Duration of a batch: long beside the scheduler's milliseconds, and a short wait at the end."""

_USUAL_KERNEL_SECONDS = 0.6
"""Compile time of a kernel, until this build has measured it."""

_MOST_BATCH_KERNELS = 64

_BATCHES_PER_THREAD = 2
"""Batches that a worker's thread has at once: one in work, and one so that it need not wait."""

_COLLECTORS = 8
"""Threads that fetch kernels."""

_MOST_REASON = 500

_CONTINUE = "run the same command again: finished kernels are in the cache"

Events = queue.SimpleQueue[Callable[[], Iterator[TaskOutcome]]]


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


def _expression(function: Callable[..., str]) -> str:
    """Returns an expression that calls a function of this package with ``request``.

    The scheduler unpickles what it passes on. It knows `eval`, and need not have nvgemm-aot.
    """
    module, name = function.__module__, function.__name__
    return f"__import__({module!r}, fromlist=[{name!r}]).{name}(request)"


class _Run:
    """One run: the workers, what waits, and what is on its way.

    Only the thread that iterates over `outcomes` changes this state. Other threads wait for the
    scheduler and the remote cache, and put events into a queue.
    """

    def __init__(
        self,
        client: Any,
        remote: RemoteCache,
        cache: Cache,
        tasks: Sequence[Task],
        patience_seconds: float,
    ) -> None:
        self._client = client
        self._remote = remote
        self._cache = cache
        self._address = client.scheduler.address
        self._patience_seconds = patience_seconds
        self._threads = Transfers(_COLLECTORS)
        self._asking = Transfers(1)
        self._events: Events = queue.SimpleQueue()
        groups = group_by_device_code(sorted(tasks, key=lambda task: str(task.process_kind)))
        self._waiting = deque(Group(tasks=group) for group in groups)
        self._left = len(tasks)
        self._members: dict[str, Member] = {}
        self._kernel_seconds = _USUAL_KERNEL_SECONDS
        self._refreshed = -math.inf
        self._alone_since: float | None = None
        self._limit_seconds = compile_limit_seconds()
        self._facts = facts_for(kinds_of(tasks))
        self._kinds = [
            (provider, target.arch, target.platform, target.cuda)
            for provider, target in kinds_of(tasks)
        ]

    def outcomes(self) -> Iterator[TaskOutcome]:
        """Yields each task with its result, as they come."""
        while self._left:
            self._refresh()
            self._take_back()
            self._require_worker()
            self._deal()
            with contextlib.suppress(queue.Empty):
                for outcome in self._events.get(timeout=_TICK_SECONDS)():
                    self._left -= 1
                    yield outcome

    def release(self) -> None:
        """Gives up what is queued; workers finish and store the batches that they have begun."""
        for member in self._members.values():
            for future in (member.check, *(batch.future for batch in member.batches)):
                if future is not None:
                    future.release()

    def _refresh(self) -> None:
        """Looks, once a second, for workers that came or went.

        Raises:
            ExecutorError: If the scheduler is lost.
        """
        if time.monotonic() < self._refreshed + _REFRESH_SECONDS:
            return
        workers = self._ask_for_workers()
        self._refreshed = time.monotonic()
        for address in self._members.keys() - workers.keys():
            self._lose(self._members.pop(address))
        for address, info in workers.items():
            member = self._members.get(address)
            if member is None:
                member = Member(address=address, threads=int(info["nthreads"]), is_running=True)
                self._members[address] = member
                self._check(member)
            member.is_running = info.get("status", "running") == "running"

    def _ask_for_workers(self) -> dict[str, Any]:
        """Returns the scheduler's workers by address."""
        asked = self._asking.submit(functools.partial(workers_of, self._client))
        end = time.monotonic() + ANSWER_SECONDS
        while self._client.status == "running":
            wait([asked], timeout=_TICK_SECONDS)
            error = asked.exception() if asked.done() else None
            if asked.done() and error is None:
                return asked.result()
            if isinstance(error, TimeoutError) or time.monotonic() > end:
                raise ExecutorError(
                    f"executor {self._address}: the scheduler does not answer, for "
                    f"{ANSWER_SECONDS:g} s; {_CONTINUE}"
                )
            if error is not None:
                break
        raise ExecutorError(
            f"executor {self._address}: the connection to the scheduler was lost; {_CONTINUE}"
        )

    def _require_worker(self) -> None:
        """Requires a worker that can compile, within some time.

        Raises:
            ExecutorError: If there is none, with each one's reason.
        """
        members = self._members.values()
        if any(member.is_usable or member.batches for member in members):
            self._alone_since = None
            return
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        is_hopeless = bool(members) and all(member.reason is not None for member in members)
        if not is_hopeless and now < self._alone_since + self._patience_seconds:
            return
        by_reason: dict[str, list[str]] = {}
        for member in members:
            reason = member.reason or (
                "it has not answered: is it busy with other work?"
                if member.is_running
                else "it is paused: its memory is full"
            )
            by_reason.setdefault(reason, []).append(member.address)
        if not by_reason:
            raise ExecutorError(
                f"executor {self._address} has no workers, for {self._patience_seconds:g} s; start "
                f"some (dask worker {self._address}), and {_CONTINUE}"
            )
        lines = [f"  {_names(addresses)}: {reason}" for reason, addresses in by_reason.items()]
        raise ExecutorError(
            "\n".join(
                [
                    f"executor {self._address}: none of {count_text(len(members), 'worker')} can "
                    f"compile for this build; mend one, and {_CONTINUE}",
                    *lines,
                ]
            )
        )

    def _take_back(self) -> None:
        """Lets others compile what workers have that no longer answer.

        A paused worker begins nothing. One that runs is refused once all kernels of its batches
        must have met the time limit: it may be busy with other work.
        """
        now = time.monotonic()
        for member in self._members.values():
            if not member.batches:
                continue
            seconds = self._patience_seconds
            if member.is_running:
                most = max(len(batch.tasks) for batch in member.batches)
                seconds += most * self._limit_seconds
            if now < member.heard_seconds + seconds:
                continue
            if member.is_running:
                self._refuse(member, f"it has answered nothing for {seconds:g} s: is it busy?")
            for batch in member.batches:
                batch.is_done = True
                batch.future.release()
                self._waiting.extendleft(reversed(batch.groups))
            member.batches.clear()

    def _check(self, member: Member) -> None:
        """Begins to ask a worker if it can compile for this build."""
        key = cache_key("executor trial", [member.address, uuid.uuid4().hex])
        request = json.dumps({"facts": self._facts, "kinds": self._kinds, "trial_key": key})
        member.check = self._submit(check_worker, request, member)
        self._when_done(member.check, functools.partial(self._collect_check, member, key))

    def _collect_check(
        self, member: Member, key: str, future: Any
    ) -> Callable[[], Iterator[TaskOutcome]]:
        answer = read_answer(future)
        if answer is None:  # the worker ended, which the next look at the workers shows
            return _nothing
        reason = answer.reason
        if reason is None:
            reason = self._trial_fault(key)
        return functools.partial(self._on_check, member, reason)

    def _trial_fault(self, key: str) -> str | None:
        """Returns the reason that a worker's entries do not count here, or None."""
        reasons: list[str] = []

        def check(_: str, payload: bytes) -> str | None:
            return None if payload == TRIAL_PAYLOAD else "it is not a worker's trial entry"

        before = self._remote.statistics.refused
        if self._remote.fetch([key], self._cache, check):
            return None
        after = self._remote.statistics
        reasons = [text for text, count in after.refused.items() if count > before.get(text, 0)]
        if after.off is not None:
            return f"this machine's remote cache does not answer: {after.off}"
        return (
            f"its entries do not reach {self._remote.address}, this machine's remote cache: "
            f"{'; '.join(reasons) or 'its cache is another one'}"
        )

    def _on_check(self, member: Member, reason: str | None) -> Iterator[TaskOutcome]:
        member.is_checked = True
        member.check = None
        if reason is not None:
            self._refuse(member, reason)
        return iter(())

    def _refuse(self, member: Member, reason: str) -> None:
        """Gives a worker no more kernels; says so once for each reason."""
        if member.reason is not None:
            return
        text = one_line(reason)[:_MOST_REASON]
        is_new = all(other.reason != text for other in self._members.values())
        member.reason = text
        _log.log(
            logging.WARNING if is_new else logging.INFO,
            "executor %s: worker %s gets no kernels: %s",
            *(self._address, member.address, text),
        )

    def _deal(self) -> None:
        """Gives batches to the workers that have room, those with the fewest first."""
        usable = [member for member in self._members.values() if member.is_usable]
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
        request = pickle.dumps(Request(groups=groups, facts=self._facts))
        batch.future = self._submit(compile_batch, request, member)
        if not member.batches:
            member.heard_seconds = time.monotonic()
        member.batches.add(batch)
        self._when_done(batch.future, functools.partial(self._collect_batch, member, batch))

    def _submit(self, function: Callable[..., str], request: object, member: Member) -> Any:
        """Submits a call of a function of this package to one worker."""
        return self._client.submit(
            *(eval, _expression(function), {"request": request}),
            key=f"nvgemm-{function.__name__}-{uuid.uuid4().hex}",
            workers=[member.address],
        )

    def _when_done(
        self, future: Any, collect: Callable[[Any], Callable[[], Iterator[TaskOutcome]]]
    ) -> None:
        """Collects a future in another thread once it is done, and queues the event."""
        future.add_done_callback(lambda _: self._queue(functools.partial(collect, future)))

    def _queue(self, collect: Callable[[], Callable[[], Iterator[TaskOutcome]]]) -> None:
        """Queues an event that another thread makes, or the error of making it."""

        def work() -> None:
            try:
                event = collect()
            except BaseException as error:
                event = functools.partial(_raise, error)
            self._events.put(event)

        self._threads.submit(work)

    def _collect_batch(
        self, member: Member, batch: Batch, future: Any
    ) -> Callable[[], Iterator[TaskOutcome]]:
        answer = read_answer(future, len(batch.tasks)) or Answer()
        there = self._fetch(task for task, _ in successes(batch, answer))
        return functools.partial(self._on_answer, member, batch, answer, there)

    def _fetch(self, tasks: Iterable[Task]) -> frozenset[str]:
        """Fetches kernels; returns the keys of those that came."""
        return fetch_kernels({task.key: task.expected for task in tasks}, self._cache, self._remote)

    def _lose(self, member: Member) -> None:
        """Handles the batches of a worker that is gone."""
        for batch in member.batches:
            self._queue(functools.partial(self._collect_batch, member, batch, None))

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
            self._refuse(member, answer.reason)
        elif lost:
            self._cache.require_writable()
            self._refuse(member, "kernels that it compiled do not arrive in the remote cache")
        if lost and (off := self._remote.statistics.off):
            raise ExecutorError(
                f"executor {self._address}: kernels cannot be fetched: the remote cache "
                f"{self._remote.address} was given up: {off}; {_CONTINUE}"
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


def _nothing() -> Iterator[TaskOutcome]:
    return iter(())


def _raise(error: BaseException) -> Iterator[TaskOutcome]:
    raise error


def _names(addresses: Sequence[str]) -> str:
    others = len(addresses) - 1
    return f"{addresses[0]}{f' and {others} more' if others else ''}"
