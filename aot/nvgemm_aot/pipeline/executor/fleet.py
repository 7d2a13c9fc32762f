"""Workers of a Dask scheduler: they come and go, and each is checked before it gets kernels."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from nvgemm_runtime.errors import ExecutorError, count_text, one_line
from nvgemm_runtime.gemm.target import Target

from ...storage.build_cache import Cache, cache_key
from ...storage.remote.remote_cache import RemoteCache
from ...storage.remote.transfers import Transfers
from ..compiler import TaskOutcome
from .batches import Batch, read_answer
from .event_queue import Event, EventQueue, yield_nothing
from .fleet_worker import TRIAL_PAYLOAD, check_worker
from .scheduler_connection import ANSWER_SECONDS, workers_of
from .worker_facts import facts_for

_log = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0

_LOOK_SECONDS = 0.2
"""Time between two looks at the connection while the scheduler is asked, in seconds."""

_MOST_REASON = 500

CONTINUE = "run the same command again: finished kernels are in the cache"
"""Next step after most errors."""


@dataclass(kw_only=True, eq=False)
class Member:
    """A worker process. It is usable once it was checked, unless there is a reason against it.

    ``heard_seconds`` is the time of its last answer, or of a batch that it got when it had none.
    """

    address: str
    threads: int
    is_running: bool
    is_checked: bool = False
    reason: str | None = None
    check: Any = None
    batches: set[Batch] = field(default_factory=set)
    heard_seconds: float = 0.0

    @property
    def is_usable(self) -> bool:
        """True if it can get kernels now."""
        return self.is_checked and self.reason is None and self.is_running


class Fleet:
    """Workers of a scheduler, as one thread sees them.

    Args:
        client: A ``distributed.Client``.
        remote: Remote cache that workers must share.
        cache: Build cache for their trial entries.
        kinds: Providers and targets to compile for.
        events: Queue for the answers to checks.
        patience_seconds: Longest time without any worker that can compile.

    Attributes:
        facts: This machine's facts, which a worker must have too.
        members: Workers by address.
    """

    def __init__(
        self,
        client: Any,
        remote: RemoteCache,
        cache: Cache,
        kinds: set[tuple[str, Target]],
        events: EventQueue,
        patience_seconds: float,
    ) -> None:
        self._client = client
        self._remote = remote
        self._cache = cache
        self._events = events
        self._patience_seconds = patience_seconds
        self._address = client.scheduler.address
        self._asking = Transfers(1)
        self._refreshed = -math.inf
        self._alone_since: float | None = None
        self._kinds = [
            (provider, target.arch, target.platform, target.cuda) for provider, target in kinds
        ]
        self.facts = facts_for(kinds)
        self.members: dict[str, Member] = {}

    def refresh(self) -> list[Member]:
        """Looks, once a second, for workers that came or went; returns those that went.

        Raises:
            ExecutorError: If the scheduler is lost.
        """
        if time.monotonic() < self._refreshed + _REFRESH_SECONDS:
            return []
        workers = self._ask_for_workers()
        self._refreshed = time.monotonic()
        gone = [self.members.pop(address) for address in self.members.keys() - workers.keys()]
        for address, info in workers.items():
            member = self.members.get(address)
            if member is None:
                member = Member(address=address, threads=int(info["nthreads"]), is_running=True)
                self.members[address] = member
                self._check(member)
            member.is_running = info.get("status", "running") == "running"
        return gone

    def require_worker(self) -> None:
        """Requires a worker that can compile, within some time.

        Raises:
            ExecutorError: If there is none, with each one's reason.
        """
        members = self.members.values()
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
                f"some (dask worker {self._address}), and {CONTINUE}"
            )
        lines = [f"  {_names(addresses)}: {reason}" for reason, addresses in by_reason.items()]
        raise ExecutorError(
            "\n".join(
                [
                    f"executor {self._address}: none of {count_text(len(members), 'worker')} can "
                    f"compile for this build; mend one, and {CONTINUE}",
                    *lines,
                ]
            )
        )

    def refuse(self, member: Member, reason: str) -> None:
        """Gives a worker no more kernels; says so once for each reason."""
        if member.reason is not None:
            return
        text = one_line(reason)[:_MOST_REASON]
        is_new = all(other.reason != text for other in self.members.values())
        member.reason = text
        _log.log(
            logging.WARNING if is_new else logging.INFO,
            "executor %s: worker %s gets no kernels: %s",
            *(self._address, member.address, text),
        )

    def submit(self, function: Callable[..., str], request: object, member: Member) -> Any:
        """Submits a call of a function of this package to one worker."""
        return self._client.submit(
            *(eval, _expression(function), {"request": request}),
            key=f"nvgemm-{function.__name__}-{uuid.uuid4().hex}",
            workers=[member.address],
        )

    def _ask_for_workers(self) -> dict[str, Any]:
        """Returns the scheduler's workers by address."""
        asked = self._asking.submit(functools.partial(workers_of, self._client))
        end = time.monotonic() + ANSWER_SECONDS
        while self._client.status == "running":
            wait([asked], timeout=_LOOK_SECONDS)
            error = asked.exception() if asked.done() else None
            if asked.done() and error is None:
                return asked.result()
            if isinstance(error, TimeoutError) or time.monotonic() > end:
                raise ExecutorError(
                    f"executor {self._address}: the scheduler does not answer, for "
                    f"{ANSWER_SECONDS:g} s; {CONTINUE}"
                )
            if error is not None:
                break
        raise ExecutorError(
            f"executor {self._address}: the connection to the scheduler was lost; {CONTINUE}"
        )

    def _check(self, member: Member) -> None:
        """Begins to ask a worker if it can compile for this build."""
        key = cache_key("executor trial", [member.address, uuid.uuid4().hex])
        request = json.dumps({"facts": self.facts, "kinds": self._kinds, "trial_key": key})
        member.check = self.submit(check_worker, request, member)
        self._events.put_when_done(
            member.check, functools.partial(self._collect_check, member, key)
        )

    def _collect_check(self, member: Member, key: str, future: Any) -> Event:
        answer = read_answer(future)
        if answer is None:  # the worker ended, which the next look at the workers shows
            return yield_nothing
        reason = answer.reason
        if reason is None:
            reason = self._trial_fault(key)
        return functools.partial(self._on_check, member, reason)

    def _trial_fault(self, key: str) -> str | None:
        """Returns the reason that a worker's entries do not count here, or None."""

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
            self.refuse(member, reason)
        return yield_nothing()


def _expression(function: Callable[..., str]) -> str:
    """Returns an expression that calls a function of this package with ``request``.

    The scheduler unpickles what it passes on. It knows `eval`, and need not have nvgemm-aot.
    """
    module, name = function.__module__, function.__name__
    return f"__import__({module!r}, fromlist=[{name!r}]).{name}(request)"


def _names(addresses: Sequence[str]) -> str:
    others = len(addresses) - 1
    return f"{addresses[0]}{f' and {others} more' if others else ''}"
