"""Kernels of the test suite that win at different m, and what is asked of graphs that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from inductor_session import InductorSession
from measured_bundles import ATEN

Tensor = torch.Tensor

SQUARE, WIDE, ONE = "Cpu_16x16", "Cpu_8x32", "Cpu_1x1"

TIMES = {
    8: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    12: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    16: {SQUARE: 300, WIDE: 500, ONE: 600, ATEN: 1000},
    24: {SQUARE: 300, WIDE: 305, ONE: 600, ATEN: 1000},
    32: {SQUARE: 500, WIDE: 500, ONE: 600, ATEN: 200},
}
"""By m, nanoseconds: WIDE is best up to 12, SQUARE from 16 to 24, then ATen."""

COMPUTED_BY = {
    2: None, 7: None, 8: WIDE, 10: WIDE, 12: WIDE, 13: None, 14: None, 15: None, 16: SQUARE,
    20: SQUARE, 24: SQUARE, 25: None, 32: None, 100: None,
}  # fmt: skip
"""What that says of an m at each side of each bound, and between; None for ATen."""


def operands(m: int) -> tuple[Tensor, Tensor]:
    """Of a product of n = 32 and k = 64."""
    return torch.randn(m, 64), torch.randn(64, 32)


def assert_right_from_threads(session: InductorSession, function: Callable[..., Tensor]) -> None:
    """Threads call one graph, each at a size of its own: results, and which kernels computed them.

    Args:
        session: What records the kernels' launches.
        function: The compiled product, which has a kernel by m as `TIMES` says.
    """
    session.record.forget()
    cases = {m: operands(m) for m in (8, 12, 16, 24, 40)}
    results: dict[int, list[Tensor]] = {m: [] for m in cases}

    def work(m: int) -> None:
        results[m] += (function(*cases[m]) for _ in range(10))

    threads = [threading.Thread(target=work, args=(m,)) for m in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for m, (a, b) in cases.items():
        torch.testing.assert_close(results[m], [a @ b] * 10)
    lines = session.record.lines()
    assert [lines.count(name) for name in (WIDE, SQUARE)] == [20, 20]
