"""Forks while another thread makes the first launch of a generated call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cpu_provider
import recording_kernels
from inductor_session import InductorSession
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.compiled import GeneratedCall
from nvgemm_runtime.launch.dispatched import dispatched
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.fork_locks import ForkLock

WHEEL = "nvgemm-kernels-model 1.0"
OPERATOR = "Cpu_1x1"


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    return recording_kernels.build_recording(
        [cpu_provider.problem()],
        tmp_path_factory.mktemp("one"),
        kernel_cache,
        candidates=len(cpu_provider.TILES),
    )


@pytest.fixture
def kernel(inductor: InductorSession, built: BuiltBundle) -> str:
    inductor.use(built.path)
    return next(one.id for one in built.header.kernels if one.operator == OPERATOR)


def compute(gemm: GeneratedCall) -> None:
    a, b, out = torch.randn(4, 64), torch.randn(64, 32), torch.full((4, 32), float("nan"))
    gemm(a, b, out=out)
    torch.testing.assert_close(out, a @ b)


@contextmanager
def held_up_in(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, gemm: GeneratedCall
) -> Iterator[None]:
    """A second thread makes the call, and waits where it calls a function; others pass."""
    function = getattr(module, name)
    inside, done = threading.Event(), threading.Event()

    def wait(*arguments: Any) -> Any:
        if threading.current_thread() is thread:
            inside.set()
            done.wait()
        return function(*arguments)

    monkeypatch.setattr(module, name, wait)
    thread = threading.Thread(target=compute, args=(gemm,))
    thread.start()
    assert inside.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def status_of_child(function: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        signal.alarm(60)  # instead of waiting for ever
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_a_child_forked_while_a_kernel_is_first_launched_launches_it(
    inductor: InductorSession, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = compiled.gemm(torch.mm, kernel, WHEEL)
    with held_up_in(monkeypatch, compiled, "prepare", gemm):
        assert status_of_child(lambda: compute(gemm)) == 0
        assert inductor.record.lines() == [OPERATOR], "the child's; the parent waits"
    assert inductor.record.lines() == [OPERATOR] * 2
    compute(gemm)


def test_a_child_forked_while_a_table_is_registered_registers_its_own(
    inductor: InductorSession, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = dispatched(torch.mm, (), (kernel,), {kernel: WHEEL})
    with held_up_in(monkeypatch, native, "load", gemm):
        assert status_of_child(lambda: compute(gemm)) == 0
        assert inductor.record.lines() == [OPERATOR]
    assert inductor.record.lines() == [OPERATOR] * 2
    compute(gemm)


def test_a_thread_that_forks_while_it_holds_a_lock_can_release_it() -> None:
    lock = ForkLock()

    def go_on() -> None:
        assert not lock.current.locked(), "a new one"

    with lock.current:
        assert status_of_child(go_on) == 0
        child = os.fork()
        if not child:
            signal.alarm(60)
    if not child:
        os._exit(0 if lock.current.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
