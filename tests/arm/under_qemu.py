"""What `tests/arm/run` has an Arm Python do: one JSON object a line for each thing that was seen.

under_qemu.py KERNELS_FOR_ARM KERNELS_FOR_X86_64 [REAL_KERNELS]
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import nvgemm_runtime

HANGS_AFTER_S = 1500


def say(step: str, result: str) -> None:
    print(json.dumps({"step": step, "result": result}), flush=True)


def import_package() -> None:
    import platform

    import torch

    began = time.monotonic()
    nvgemm_runtime.load_operators()
    loading = time.monotonic() - began
    say(
        "import and native part",
        f"nvgemm-aot {nvgemm_runtime.__version__}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {platform.machine()}; operators loaded in {loading:.1f} s",
    )


def discover(arm: Path, other: Path) -> None:
    """The bundle for Arm is usable, and the one for x86-64 says why not."""
    from nvgemm_runtime.matching.device import device_facts

    facts = device_facts("cpu", 0)
    refusals = {found.path: found.refusal(facts) for found in nvgemm_runtime.bundles()}
    if refusals[arm] is not None:
        raise AssertionError(refusals[arm])
    said = refusals[other]
    if said is None or "built for platform linux_x86_64" not in said:
        raise AssertionError(f"{other} is not refused for its platform: {said}")
    say("discover", f"{arm.name} is usable; {other.name}: {said}")


def compute(arm: Path) -> None:
    """Every problem of a bundle by the functions, and by torch's operators."""
    import torch
    from gemm_arguments import exact_arguments
    from gemm_reference import assert_exact, has_exact_results

    from nvgemm_runtime.bundle.reader import Bundle

    by_function: Counter[str] = Counter()
    by_operator: Counter[str] = Counter()
    with Bundle(arm) as bundle:
        header = bundle.header
    for ranking in header.rankings:
        problem = ranking.problem
        if not has_exact_results(problem.signature):
            continue
        arguments = exact_arguments(problem, "cpu")
        name, tensors, keywords = arguments.function_call()
        getattr(nvgemm_runtime, name)(*tensors, **keywords, out=arguments.out)
        assert_exact(arguments.out, arguments)
        by_function[name] += 1
        name, tensors, keywords = arguments.operator_call()
        operator = getattr(torch.ops.nvgemm_aot, name)
        for entry in ranking.kernels:
            out = operator(*tensors, header.kernels[entry.kernel].id, **keywords)
            assert_exact(out, arguments)
            by_operator[name] += 1
    say("match, load, launch", f"exact problems: {_listed(by_function)}")
    say("torch operators", f"exact calls of kernels by id: {_listed(by_operator)}")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def open_real_kernels(path: Path) -> None:
    """Load NVIDIA's library and real launchers, and call these without arguments."""
    from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
    from nvgemm_runtime.bundle.reader import Bundle
    from nvgemm_runtime.errors import NvgemmError
    from nvgemm_runtime.launch.loading import native
    from nvgemm_runtime.launch.loading.loader import require_libraries
    from nvgemm_runtime.matching.device import find_runtime_library

    launcher = native.load()
    refusals = []
    with Bundle(path) as bundle:
        target = bundle.header.target
        require_libraries(bundle.header)
        library = find_runtime_library(target.cuda)
        assert library is not None
        say("NVIDIA's library", f"{library.path.name} {library.version} for {target.key} is loaded")
        for kernel in bundle.header.kernels:
            convention = parse_calling_convention(kernel.calling_convention)
            assert convention is not None
            address = launcher.open_kernel(bundle.payload(kernel), convention.symbol, kernel.id)
            refusals.append(call_without_arguments(address))
            handle = launcher.register_kernel(
                id=kernel.id,
                function_address=address,
                signature=kernel.signature,
                alignment_bytes=kernel.alignment_bytes,
                target=target,
                convention=convention,
            )
            launch_without_driver(launcher, handle)
    say(
        "real launchers",
        f"{len(refusals)} opened, all their symbols bound; called without arguments each says: "
        + "; ".join(sorted(set(refusals))),
    )
    try:
        found = launcher.clusters_at_once(0, 2)
    except NvgemmError as error:
        say("the driver", f"DriverError: {error}"[:200])
    else:
        raise AssertionError(f"a device without a driver runs {found} clusters")


def call_without_arguments(address: int) -> str:
    """What a launcher's own check of its arguments says: its code runs, and no device is needed."""
    import tvm_ffi

    function = tvm_ffi.Function.__from_extern_c__(address)
    try:
        function()
    except Exception as error:
        said = str(error).split(" when calling")[0]
        return f"{type(error).__name__}: {said}"
    raise AssertionError("a launcher took a call without arguments")


def launch_without_driver(launcher, handle: int) -> None:  # type: ignore[no-untyped-def]
    """A kernel for a GPU takes no operands of the CPU."""
    import torch

    operands = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3)]
    try:
        launcher.launch(handle, *operands)
    except (TypeError, ValueError):
        return
    raise AssertionError("operands on the CPU were taken")


def main(arm: str, other: str, real: str | None = None) -> None:
    import_package()
    discover(Path(arm), Path(other))
    compute(Path(arm))
    if real is not None:
        open_real_kernels(Path(real))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # libraries of CUDA take long to end under qemu
