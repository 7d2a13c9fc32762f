"""Dispatch tables of the native launcher: which kernel computes, by the rows of A."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cpu_kernels
from cpu_kernels import Register, operands, signature
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.native import ATEN_HANDLE

Launcher = native.Native

ATEN = "ATen"


def writes(value: int) -> str:
    """A behaviour that fills the result with a number instead of computing it."""
    return f"""{{
      int64_t count = 1;
      for (int i = 0; i < RANK; ++i) count *= out->shape[i];
      for (int64_t i = 0; i < count; ++i) store_fp32(out->data, i, {value}.0f);
      return 0;
    }}"""


@pytest.fixture(scope="module")
def seven(register: Register) -> int:
    return register(behaviour=writes(7))[1]


@pytest.fixture(scope="module")
def eight(register: Register) -> int:
    return register(behaviour=writes(8), alignment=16)[1]


def launched(lib: Launcher, table: int, m: int, k: int = 8) -> float | str:
    """The number that was written for m rows, or in words what was returned instead."""
    a, b, out = operands(m, 8, k)
    out.fill_(0)
    done = lib.try_dispatch(table, a, b, out)
    if done is not True:
        assert not out.any(), "nothing is launched"
        return ATEN if done is False else f"slot {done}"
    assert (out == out[0, 0]).all()
    return float(out[0, 0])


def test_the_rows_of_a_decide(lib: Launcher, seven: int, eight: int) -> None:
    table = lib.register_table((4, 8, 16), (ATEN_HANDLE, 1, 0, ATEN_HANDLE))
    lib.set_in_table(table, 0, eight)
    lib.set_in_table(table, 1, seven)
    assert [launched(lib, table, m) for m in (1, 3, 4, 7, 8, 15, 16, 1000)] == [
        ATEN, ATEN, 7.0, 7.0, 8.0, 8.0, ATEN, ATEN,
    ]  # fmt: skip


def test_a_table_of_one_segment(lib: Launcher, seven: int) -> None:
    table = lib.register_table((), (0,))
    lib.set_in_table(table, 0, seven)
    assert launched(lib, table, 5) == 7.0
    assert launched(lib, lib.register_table((), (ATEN_HANDLE,)), 5) == ATEN


def test_an_empty_slot_is_returned(lib: Launcher, seven: int) -> None:
    table = lib.register_table((4, 8), (0, 1, 0))
    assert launched(lib, table, 1) == "slot 0"
    assert launched(lib, table, 5) == "slot 1"
    lib.set_in_table(table, 1, seven)
    assert launched(lib, table, 5) == 7.0
    assert launched(lib, table, 8) == "slot 0"


def test_a_slot_can_be_left_to_aten(lib: Launcher, seven: int) -> None:
    table = lib.register_table((4,), (0, 1))
    lib.set_in_table(table, 0, ATEN_HANDLE)
    lib.set_in_table(table, 1, seven)
    assert launched(lib, table, 1) == ATEN
    assert launched(lib, table, 4) == 7.0


def test_what_a_kernel_cannot_take_is_for_aten_each_time(lib: Launcher, eight: int) -> None:
    table = lib.register_table((), (0,))
    lib.set_in_table(table, 0, eight)
    a, b, out = operands(8, 8, 8)
    unaligned = torch.zeros(65)[1:].view(8, 8).copy_(a)
    for _ in range(2):
        assert lib.try_dispatch(table, unaligned, b, out) is False
        assert lib.try_dispatch(table, a, b, out) is True


def test_a_tensor_without_rows_is_for_aten(lib: Launcher, seven: int) -> None:
    table = lib.register_table((0,), (ATEN_HANDLE, 0))
    lib.set_in_table(table, 0, seven)
    _, b, out = operands(8, 8, 8)
    assert lib.try_dispatch(table, torch.zeros(8), b, out) is False


def test_rows_of_a_batch_are_those_of_one_matrix(lib: Launcher, register: Register) -> None:
    _, handle = register(signature(op=Op.BMM))
    table = lib.register_table((5, 6), (ATEN_HANDLE, 0, ATEN_HANDLE))
    lib.set_in_table(table, 0, handle)
    a, b, out = operands(5, 6, 7, 3)
    assert lib.try_dispatch(table, a, b, out) is True
    torch.testing.assert_close(out, a @ b)
    assert lib.try_dispatch(table, *operands(3, 6, 7, 5)) is False


def test_rows_of_groups_are_those_of_all(lib: Launcher, register: Register) -> None:
    _, handle = register(signature("tn", op=Op.GROUPED_MM, operand=DType.BF16), alignment=2)
    table = lib.register_table((8, 9), (ATEN_HANDLE, 0, ATEN_HANDLE))
    lib.set_in_table(table, 0, handle)
    a, b = torch.randn(8, 4).bfloat16(), torch.randn(2, 6, 4).bfloat16().mT
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    out = torch.empty(8, 6, dtype=torch.bfloat16)
    assert lib.try_dispatch(table, a, b, out, offsets) is True
    torch.testing.assert_close(out[:3], a[:3] @ b[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[3:], a[3:] @ b[1], rtol=2e-2, atol=2e-2)
    assert lib.try_dispatch(table, a[:7], b, out[:7], offsets) is False


@pytest.mark.parametrize(
    ("bounds", "slots", "said"),
    [
        ((4,), (0,), "1 bounds need 2 slots"),
        ((4, 4), (0, 0, 0), "4 follows 4; must ascend"),
        ((4, 3), (0, 0, 0), "3 follows 4; must ascend"),
        ((), (-2,), "-2; must be in -1..-2"),
    ],
)
def test_a_table_that_is_none_is_refused(
    lib: Launcher, bounds: tuple[int, ...], slots: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        lib.register_table(bounds, slots)


def test_what_is_not_there_is_named(lib: Launcher, seven: int) -> None:
    table = lib.register_table((), (0,))
    a, b, out = operands(4, 4, 4)
    for unknown in (-1, table + 1, 1 << 40):
        with pytest.raises(ValueError, match=f"no dispatch table has the handle {unknown}"):
            lib.try_dispatch(unknown, a, b, out)
    for slot in (-1, 1):
        with pytest.raises(ValueError, match=f"no slot {slot}; it has 1"):
            lib.set_in_table(table, slot, seven)
    with pytest.raises(NoKernelError, match="no kernel has the handle"):
        lib.set_in_table(table, 0, 1 << 40)


def test_what_goes_wrong_in_a_kernel_is_an_error(lib: Launcher, register: Register) -> None:
    table = lib.register_table((), (0,))
    lib.set_in_table(table, 0, register(behaviour=cpu_kernels.RAISES)[1])
    with pytest.raises(RuntimeError, match="out of patience"):
        lib.try_dispatch(table, *operands(4, 4, 4))


def test_threads_use_one_table_at_different_sizes(lib: Launcher, seven: int, eight: int) -> None:
    """While slots are set; each gets its own kernel, or is told that there is none yet."""
    table = lib.register_table((4, 8), (0, 1, ATEN_HANDLE))
    expected = {1: {7.0, "slot 0"}, 5: {8.0, "slot 1"}, 9: {ATEN}}
    wrong: list[object] = []
    begin = threading.Barrier(len(expected) + 1)

    def call(m: int) -> None:
        begin.wait()
        for _ in range(500):
            found = launched(lib, table, m)
            if found not in expected[m]:
                wrong.append((m, found))

    threads = [threading.Thread(target=call, args=(m,)) for m in expected]
    for thread in threads:
        thread.start()
    begin.wait()
    lib.set_in_table(table, 0, seven)
    lib.set_in_table(table, 1, eight)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [launched(lib, table, m) for m in expected] == [7.0, 8.0, ATEN]


def test_a_forked_child_registers_and_calls_tables(
    lib: Launcher, seven: int, in_a_child: Callable[[Callable[[], Any]], bool]
) -> None:
    table = lib.register_table((), (0,))

    def use() -> bool:
        lib.set_in_table(table, 0, seven)
        own = lib.register_table((), (0,))
        lib.set_in_table(own, 0, seven)
        return launched(lib, table, 3) == launched(lib, own, 3) == 7.0

    assert in_a_child(use)
    assert launched(lib, table, 3) == "slot 0", "the parent's table is its own"


@pytest.fixture
def in_a_child() -> Callable[[Callable[[], Any]], bool]:
    """Calls a function in a forked child; whether that returned something true."""
    import os

    def call(function: Callable[[], Any]) -> bool:
        child = os.fork()
        if not child:
            status = 1
            try:
                status = 0 if function() else 1
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1] == 0

    return call
