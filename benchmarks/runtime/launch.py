"""Measures host time of one launcher call, with an empty kernel for the CPU.

The rest is the way to the kernel: TVM-FFI's conversion of three tensors, every check, and, for the
operators, torch's dispatcher. ``torch.mm(out=)`` of 1 x 1 matrices takes turns with it. So do
``extern_kernels.mm``, which compiled graphs call, and the call that replaces it.

    python -m benchmarks.runtime.launch
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import click
import torch
from torch._inductor.select_algorithm import extern_kernels

from benchmarks.record import Baseline, Case
from benchmarks.shared.resuming import recording, records_option

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))
import cpu_kernels
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.dispatched import dispatched
from nvgemm_runtime.launch.loading import native

CALLS = 20_000
ROUNDS = 15


@click.command()
@records_option
def main(records_path: Path | None) -> None:
    """Measure and print a table."""
    lib = native.load()
    served = cpu_kernels.signature()
    with tempfile.TemporaryDirectory() as directory:
        kernel = cpu_kernels.load(served, Path(directory), cpu_kernels.NOTHING)
    handle = lib.register_kernel(
        id=kernel.id,
        function_address=kernel.address,
        signature=served,
        alignment_bytes=4,
        target=None,
    )
    a, b, out = torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    launch, mm = lib.launch, torch.ops.nvgemm_aot.mm
    stock = extern_kernels.mm
    # The kernel is in no bundle, so the generated call gets its handle.
    with mock.patch.object(compiled, "prepare", return_value=SimpleNamespace(handle=handle)):
        generated = compiled.gemm(stock, kernel.id, "no wheel")
        by_m = dispatched(stock, (8, 16), ("", kernel.id, ""), {kernel.id: "no wheel"})
        rows = torch.ones(8, 1), b, torch.ones(8, 1)
        generated(a, b, out=out)
        by_m(*rows[:2], out=rows[2])
    ways: dict[str, Callable[[], object]] = {
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "extern_kernels.mm": lambda: stock(a, b, out=out),
        "generated call": lambda: generated(a, b, out=out),
        "generated call by m": lambda: by_m(rows[0], b, out=rows[2]),
        "launch(handle, a, b, out)": lambda: launch(handle, a, b, out),
        "op mm.out": lambda: mm.out(a, b, kernel.id, out=out),
        "op mm": lambda: mm.default(a, b, kernel.id),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(ROUNDS):  # in turns, so that a busy machine affects all alike
            for name, call in ways.items():
                times[name].append(timeit.timeit(call, number=CALLS) / CALLS)
    print(f"torch {torch.__version__}; median and least of {ROUNDS} rounds of {CALLS} calls, ns")
    for name, seconds in times.items():
        print(f"{name:28}{statistics.median(seconds) * 1e9:8.0f}{min(seconds) * 1e9:8.0f}")
    with recording(records_path, "runtime.launch", {"torch": torch.__version__}) as cases:
        medians = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
        mm_out = Baseline(name="torch.mm(out=)", value=medians["torch.mm(out=)"])
        cases += [
            Case(name=name, figure=median, unit="us", baseline=mm_out)
            for name, median in medians.items()
        ]


if __name__ == "__main__":
    main()
