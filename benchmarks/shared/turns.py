"""Turns for benchmarks that share a GPU.

Autotuning Triton's kernels leaves the GPU idle for seconds while the host compiles. With ``--turns
FILE``, processes that name the same file take turns: each holds the GPU from its start, releases it
after every size and while it waits for a compiler, and launches nothing meanwhile. Measurements of
one never overlap with launches of another. They share the host all the time: leave cores free of
compilers (``TORCHINDUCTOR_COMPILE_THREADS``).
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PAUSE_S = 0.005
"""Seconds for which the GPU stays free, so that a waiting process gets the lock."""

_lock: IO[str] | None = None


def take_turns(path: Path) -> None:
    """Waits for the GPU, and takes it in turn with other processes that name this file."""
    global _lock
    _lock = path.open("a")
    fcntl.flock(_lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def others_turn() -> Iterator[None]:
    """Lets others have a shared GPU, and waits for it at the end."""
    if _lock is None:
        yield
        return
    fcntl.flock(_lock, fcntl.LOCK_UN)
    time.sleep(PAUSE_S)
    try:
        yield
    finally:
        fcntl.flock(_lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Lets others have the GPU while torch.compile waits for its compilers.

    It waits in two places: before it times choices, and before it loads a finished module. Both
    names of torch are private, and were run on torch 2.11.
    """
    if _lock is None:
        yield
        return
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    make_waiting, wait = AlgorithmSelectorCache.make_precompile_fn, AsyncCompile.wait

    def make_waiting_in_turn(*arguments: Any, **options: Any) -> Callable[[], Any]:
        return _in_others_turn(make_waiting(*arguments, **options))

    AlgorithmSelectorCache.make_precompile_fn = make_waiting_in_turn
    AsyncCompile.wait = _in_others_turn(wait)
    try:
        yield
    finally:
        AlgorithmSelectorCache.make_precompile_fn, AsyncCompile.wait = make_waiting, wait


def _in_others_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def called(*arguments: Any, **options: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or launches would run in another's turn
        with others_turn():
            return function(*arguments, **options)

    return called
