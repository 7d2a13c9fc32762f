"""Threads that move entries. They end with the process, however long a server takes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class Transfers:
    """A pool of daemon threads, started as needed.

    `concurrent.futures` waits for its threads when the process ends, and a server that hangs would
    keep it from ending.
    """

    def __init__(self, most_threads: int) -> None:
        self._most = most_threads
        self._threads = 0
        self._idle = threading.Semaphore(0)
        self._starting = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function in a thread."""
        future: Future[Result] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(work)
        self._start_thread()
        return future

    def _start_thread(self) -> None:
        with self._starting:
            if self._idle.acquire(blocking=False) or self._threads == self._most:
                return
            self._threads += 1
        threading.Thread(target=self._serve, name="nvgemm-remote-cache", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._work.get()()
            self._idle.release()
