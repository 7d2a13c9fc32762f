"""Remote cache: fetches entries that other machines made, and sends them this machine's.

A build never fails because of it. A store that fails twice in a row, or costs more time than it can
save, is not used again by this process, and one warning says why.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TypeVar

from nvgemm_runtime.errors import StorageError, count_text
from nvgemm_runtime.settings import REMOTE_CACHE_VARIABLE, remote_cache_timeout

from ..build_cache import Cache
from .signed_entries import (
    MAX_ENTRY_BYTES,
    MAX_PAYLOAD_BYTES,
    EntryError,
    decode_entry,
    encode_entry,
)
from .store_trust import StoreTrust, current_trust
from .store_urls import open_store
from .stores import MAX_CONNECTIONS, Store, StoreError
from .transfers import Transfers

_log = logging.getLogger(__name__)

Check = Callable[[str, bytes], "str | None"]
"""Checks a key's payload; returns the reason to refuse it, or None."""

_ATTEMPTS = 2
_PAUSE_SECONDS = 0.2
"""Pause between attempts."""

_SECONDS_PER_ENTRY = 0.2
"""Waiting time that an entry is worth; a kernel compiles in 0.6 s of a core."""

_POLL_SECONDS = 0.25

_MOST_REASONS = 16
"""Most distinct reasons for refusals that are counted and logged; texts hold a store's numbers."""

OTHER_REASONS = "other reasons"

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RemoteStatistics:
    """Counts for a remote cache in this process.

    Attributes:
        address: The store, without credentials.
        hits: Entries fetched and taken.
        misses: Entries that the store did not have.
        refused: Reasons for entries not taken, at most 16 and `OTHER_REASONS`, with their numbers.
        pushed: Entries sent.
        bytes_down, bytes_up: Bytes of entries, as stored.
        seconds: Time that this process waited for the store.
        off: Reason for giving up the store, or None.
        unwritten: Reason for sending nothing any more, or None.
    """

    address: str
    hits: int = 0
    misses: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    pushed: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    off: str | None = None
    unwritten: str | None = None


class RemoteCache:
    """A store behind the build cache. A context manager: leaving it waits for what is being sent.

    Used by several threads at once. All calls together wait at most twice the time limit of an
    operation, and 0.2 s for each entry.

    Args:
        store: The store.
        trust: Rules for its entries.
        operation_seconds: Longest time of an operation.
    """

    def __init__(self, store: Store, trust: StoreTrust, operation_seconds: float) -> None:
        self._store = store
        self.trust = trust
        self._transfers = Transfers(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._off = threading.Event()
        self._off_reason: str | None = None
        self._unwritten_reason: str | None = None
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._allowed_seconds = _ATTEMPTS * operation_seconds
        self._seconds = 0.0
        self._sending: set[Future[None]] = set()

    @property
    def address(self) -> str:
        """The store's scheme, host and path, without credentials."""
        return self._store.address

    @property
    def statistics(self) -> RemoteStatistics:
        """Returns the counts so far."""
        with self._lock:
            return RemoteStatistics(
                address=self._store.address,
                **self._counts,
                refused=dict(self._refused),
                seconds=self._seconds,
                off=self._off_reason,
                unwritten=self._unwritten_reason,
            )

    def __enter__(self) -> RemoteCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.flush()
        self._off.set()  # what still runs must neither go on nor warn
        self._store.close()

    def fetch(self, keys: Iterable[str], into: Cache, check: Check) -> frozenset[str]:
        """Fetches entries into the local cache.

        Args:
            keys: Keys that the local cache lacks.
            into: The local cache.
            check: Called in several threads with each payload whose signature counts.

        Returns:
            The keys that the local cache now has.
        """
        wanted = list(dict.fromkeys(keys))
        if not wanted or not self.trust.reads or self._off.is_set():
            return frozenset()
        futures = {
            key: self._transfers.submit(partial(self._fetch_one, key, into, check))
            for key in wanted
        }
        self._wait(futures.values())
        return frozenset(
            key
            for key, future in futures.items()
            if future.done() and not future.cancelled() and future.result()
        )

    def push(self, keys: Iterable[str], source: Cache) -> None:
        """Begins to send the local cache's entries, in the background; see `flush`."""
        for key in keys:
            if not self.trust.writes or self._off.is_set() or self._unwritten_reason is not None:
                return
            future = self._transfers.submit(partial(self._push_one, key, source))
            with self._lock:
                self._sending.add(future)
            future.add_done_callback(self._forget)

    def flush(self) -> None:
        """Waits until everything is sent, as long as that is worth it."""
        with self._lock:
            sending = list(self._sending)
        self._wait(sending)

    def probe(self) -> str | None:
        """Asks the store for an entry; returns why it does not answer, or None."""
        return self._ask(partial(self._store.get, _probe_key(), 0))

    def probe_writing(self) -> str | None:
        """Stores a few bytes under a key of this user's; returns why that fails, or None."""
        return self._ask(partial(self._store.put, _probe_key(), b"probe"))

    def _ask(self, operation: Callable[[], object]) -> str | None:
        future = self._transfers.submit(partial(self._attempt, operation))
        try:
            future.result(timeout=self._allowed_seconds)
        except StoreError as error:
            return str(error)
        except FutureTimeoutError:
            future.cancel()
            return f"no answer within {self._allowed_seconds:g} s"
        return None

    def _fetch_one(self, key: str, into: Cache, check: Check) -> bool:
        """Fetches one entry; returns True if the local cache now has it."""
        try:
            data = self._attempt(partial(self._store.get, key, MAX_ENTRY_BYTES))
        except StoreError as error:
            self._turn_off(str(error))
            return False
        if data is None:
            self._count(misses=1)
            return False
        self._count(bytes_down=len(data))
        try:
            entry = decode_entry(data)
            refusal = self.trust.refusal(key, entry.sha256, entry.signatures)
            if refusal is None:
                payload = entry.open()
                refusal = check(key, payload)
        except EntryError as error:
            refusal = str(error)
        except Exception as error:
            refusal = f"it cannot be checked: {type(error).__name__}"
        if refusal is not None:
            self._refuse(key, refusal)
            return False
        try:
            into.put(key, payload, is_durable=False)
        except StorageError:
            return False  # compiling reports it
        self._count(hits=1)
        return True

    def _push_one(self, key: str, source: Cache) -> None:
        if self._unwritten_reason is not None:
            return
        try:
            entry = source.read(key)
        except StorageError:
            return
        if entry is None or len(entry.payload) > MAX_PAYLOAD_BYTES:
            return
        data = encode_entry(entry.payload, entry.sha256, self.trust.sign(key, entry.sha256))
        try:
            self._attempt(partial(self._store.put, key, data))
        except StoreError as error:
            if error.is_transient:
                self._turn_off(str(error))
            else:
                self._stop_writing(str(error))
            return
        self._count(pushed=1, bytes_up=len(data))

    def _attempt(self, operation: Callable[[], Result]) -> Result:
        """Runs an operation, again if it fails for now.

        Raises:
            StoreError: If it fails for good, or the store is given up.
        """
        for remaining in reversed(range(_ATTEMPTS)):
            if self._off.is_set():
                break
            try:
                return operation()
            except StoreError as error:
                if not (remaining and error.is_transient) or self._off.wait(_PAUSE_SECONDS):
                    raise
        raise StoreError("given up", is_transient=True)

    def _wait(self, futures: Iterable[Future[Result]]) -> None:
        """Waits until all are done, the store is given up, or the time allowed is over."""
        began = time.monotonic()
        pending = set(futures)
        with self._lock:
            self._allowed_seconds += _SECONDS_PER_ENTRY * len(pending)
            end = began + self._allowed_seconds - self._seconds
        while pending and not self._off.is_set():
            _, pending = wait(pending, timeout=_POLL_SECONDS)
            if pending and time.monotonic() > end:
                self._turn_off(
                    f"it is too slow: {count_text(len(pending), 'entry')} not done after "
                    f"{time.monotonic() - began:.0f} s"
                )
        for future in pending:
            future.cancel()
        with self._lock:
            self._seconds += time.monotonic() - began

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._sending.discard(future)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _refuse(self, key: str, reason: str) -> None:
        with self._lock:
            if reason not in self._refused and len(self._refused) >= _MOST_REASONS:
                reason = OTHER_REASONS
            self._refused[reason] += 1
            is_first = self._refused[reason] == 1
        if is_first:
            _log.warning(
                "remote cache %s: refused entry %s, which is compiled here instead: %s",
                *(self._store.address, key, reason),
            )

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            if self._off.is_set():
                return
            self._off_reason = reason
            self._off.set()
        _log.warning(
            "remote cache %s is not used any more by this process, and the local cache serves: %s; "
            "check it with nvgemm-aot cache remote, or unset %s",
            *(self._store.address, reason, REMOTE_CACHE_VARIABLE),
        )

    def _stop_writing(self, reason: str) -> None:
        with self._lock:
            if self._unwritten_reason is not None:
                return
            self._unwritten_reason = reason
        _log.warning(
            "remote cache %s takes no entries of this process any more: %s; it is still read",
            *(self._store.address, reason),
        )


def _probe_key() -> str:
    """Returns a key for each user and machine: a directory may refuse to replace others' files."""
    user = f"{socket.gethostname()} {os.geteuid()}"
    return f"probe-{hashlib.sha256(user.encode()).hexdigest()[:16]}"


def open_remote() -> RemoteCache | None:
    """Opens the remote cache that ``$NVGEMM_AOT_REMOTE_CACHE`` names, without connecting to it.

    Returns:
        The remote cache, or None if the variable is not set.

    Raises:
        SettingError: If a setting is wrong.
        SignatureError: If the policy or the signing key cannot be used.
        ToolchainError: If a package is missing.
    """
    text = os.environ.get(REMOTE_CACHE_VARIABLE)
    if not text:
        return None
    seconds = remote_cache_timeout()
    return RemoteCache(open_store(text, seconds), current_trust(), seconds)
