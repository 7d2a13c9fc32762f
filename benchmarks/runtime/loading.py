"""Measures loading and launching prebuilt kernels, on a GPU, from installed wheels.

    python -m benchmarks.runtime.loading [--json results.json]

- entry to launchable: from a bundle's entry to a handle: read, hash, decompress, load, register.
- first launch: until the kernel has run once, with the upload of its device code.
- host time: a call until it returns, with the GPU behind; the best of several windows, in turns
  with ``torch.mm(out=)``. "generated call" is the call in a compiled graph, ``extern_kernels.mm``
  the stock one; `benchmarks.runtime.calls` measures dispatch by m and C++. With the builder
  installed, ``cutlass.operators``' own ``Operator.run`` takes part.
- memory: resident and device memory per kernel, over all installed kernels.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch._inductor.select_algorithm import extern_kernels

from benchmarks.cases import write_cases
from benchmarks.runtime.host_time import host_times_us
from benchmarks.shared.resuming import this_run
from nvgemm_runtime import __version__, bundles, mm
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.api import choose
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.loader import KernelLoader
from nvgemm_runtime.matching.device import device_facts

WINDOW_CALLS = 200
WINDOWS = 30


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def usable_kernels() -> list[tuple[Any, Any]]:
    """Returns every kernel that the GPU can run, once each."""
    facts = device_facts("cuda", 0)
    kernels = {
        kernel.id: (found.bundle, kernel)
        for found in bundles()
        if found.bundle is not None and found.refusal(facts) is None
        for kernel in found.bundle.header.kernels
    }
    return list(kernels.values())


def operands_for(kernel: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns small operands for a kernel's signature."""
    signature = kernel.signature
    lead = (2,) if signature.op is Op.BMM else ()
    a, b, out = (
        torch.randn(*lead, 256, 256, device="cuda").to(torch_dtype(dtype))
        for dtype in (signature.a, signature.b, signature.out)
    )
    a = a if signature.layout.a_row_major else a.mT
    b = b if signature.layout.b_row_major else b.mT
    return a, b, out


def loading(kernels: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Loads every kernel anew and launches it once."""
    library = KernelLoader()
    launch = native.load().launch
    bundle, kernel = kernels[0]
    library.load(bundle, kernel)  # once a process: libraries, the bundle's dictionary
    torch.cuda.synchronize()
    host, device = resident_bytes(), torch.cuda.mem_get_info()[0]
    load_us, first_us = [], []
    for bundle, kernel in kernels[1:]:
        operands = operands_for(kernel)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loaded = library.load(bundle, kernel)
        loaded_at = time.perf_counter()
        launch(loaded.handle, *operands)
        torch.cuda.synchronize()
        first_us.append((time.perf_counter() - loaded_at) * 1e6)
        load_us.append((loaded_at - begin) * 1e6)
    count = len(load_us)
    return {
        "kernels": count,
        "entry_to_launchable_us": load_us,
        "first_launch_us": first_us,
        "host_bytes_per_kernel": (resident_bytes() - host) / count,
        "device_bytes_per_kernel": (device - torch.cuda.mem_get_info()[0]) / count,
    }


def launching() -> dict[str, list[float]]:
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16).T
    out = torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)
    kernel = choose(a, b, out)
    launch, handle, id_ = native.load().launch, kernel.handle, kernel.kernel.id
    stock = extern_kernels.mm
    generated = compiled.gemm(stock, id_, "an installed wheel")
    calls: dict[str, Callable[[], object]] = {
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "extern_kernels.mm": lambda: stock(a, b, out=out),
        "generated call": lambda: generated(a, b, out=out),
        "mm(out=, kernel=)": lambda: mm(a, b, out, kernel),
        "mm(out=), kernel chosen anew": lambda: mm(a, b, out),
        "launch": lambda: launch(handle, a, b, out),
        "operator mm.out": lambda: torch.ops.nvgemm_aot.mm.out(a, b, id_, out=out),
    }
    calls |= operator_run(a, b, out)
    with torch.no_grad():
        return host_times_us(calls, windows=WINDOWS, window_calls=WINDOW_CALLS)


def operator_run(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Returns the same kernel family through its own library, or None without it."""
    try:
        import cutlass.operators as operators
    except ImportError:
        return {}
    arguments = operators.GemmArguments(A=a, B=b, out=out, accumulator_type=torch.float32)
    operator = operators.get_operators(args=arguments, target_sm="90a")[0]
    artifact = operator.compile(arguments, target_sm="90a")
    return {
        "Operator.run": lambda: operator.run(
            arguments, compiled_artifact=artifact, assume_supported_args=True
        )
    }


def row(label: str, values: list[float], unit: str) -> str:
    ordered = sorted(values)
    return (
        f"{label:<44} {statistics.median(ordered):9.2f} {ordered[0]:9.2f} {ordered[-1]:9.2f} {unit}"
    )


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
def main(json_path: Path | None) -> None:
    """Measure and print a table."""
    torch.zeros(1, device="cuda")
    begin = time.perf_counter()
    kernels = usable_kernels()
    opening_ms = (time.perf_counter() - begin) * 1e3
    loads, launches = loading(kernels), launching()
    reference = statistics.median(launches["torch.mm(out=)"])
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nvgemm-aot": __version__,
        "opening_bundles_ms": opening_ms,
        "loading": loads,
        "host_time_us": launches,
    }
    click.echo(f"{result['gpu']}, torch {torch.__version__}, {loads['kernels'] + 1} kernels")
    click.echo(f"{'':<44} {'median':>9} {'least':>9} {'most':>9}")
    click.echo(row("entry to launchable", loads["entry_to_launchable_us"], "us"))
    click.echo(row("first launch, with upload", loads["first_launch_us"], "us"))
    for name, times in launches.items():
        click.echo(row(f"host time, {name}", times, "us"))
    for name, times in launches.items():
        ratio = statistics.median(times) / reference
        click.echo(f"{f'… over torch.mm(out=), {name}':<44} {ratio:9.2f}")
    click.echo(f"{'host memory a kernel':<44} {loads['host_bytes_per_kernel'] / 1e3:9.1f} kB")
    click.echo(f"{'device memory a kernel':<44} {loads['device_bytes_per_kernel'] / 1e3:9.1f} kB")
    click.echo(f"{'opening all bundles':<44} {opening_ms:9.2f} ms")
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        write_cases(json_path, "runtime.loading", result, result, **this_run())


if __name__ == "__main__":
    main()
