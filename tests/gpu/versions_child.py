"""One process of the matrix of versions (`versions.py`): which libraries it has, and what ran.

``launches`` launches each usable kernel of the named bundles in turn and compares exactly.
``failure`` makes CUDA refuse a launch, by a device that does not exist and by device code for
another architecture, and expects errors that a process survives; without a GPU it has a kernel
refuse its operands. Prints one JSON object; whatever goes wrong is an exception.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys

import torch
import tvm_ffi
from direct_call import raised_on
from edges import edges
from gemm_arguments import exact_arguments
from gemm_reference import assert_exact, has_exact_results

from nvgemm_runtime import bundles
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.imported_symbols import RELEASES_ITS_LOCK
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import DriverError
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import extra_roles
from nvgemm_runtime.gemm.target import CPU
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.loader import require_libraries
from nvgemm_runtime.launch.select import load_kernel
from nvgemm_runtime.matching.device import DeviceFacts, device_facts, find_runtime_library
from nvgemm_runtime.matching.refusals import refusal

LAUNCHES = 64
"""Least number of launches in a process."""

HANGS_AFTER_S = 100
"""A process that takes longer prints where it stands, and ends; importing torch is most of it."""

NO_DEVICE = 99
"""A device that no machine has."""

Place = tuple[Bundle, Kernel]


def launch_all(kernels: list[Place], device: str) -> str:
    """Launch in turn, at the edges of each kernel's sizes; each kernel at least once."""
    count = max(LAUNCHES, len(kernels))
    rounds = itertools.chain.from_iterable(
        zip(*(itertools.cycle(edges(k.signature, k.alignment_bytes)) for _, k in kernels))
    )
    turns = itertools.cycle([kernel.id for _, kernel in kernels])
    for problem, kernel_id in itertools.islice(zip(rounds, turns), count):
        arguments = exact_arguments(problem, device)
        loaded = load_kernel(kernel_id)
        loaded.launch(arguments.a, arguments.b, arguments.out, *arguments.others)
        assert_exact(arguments.out, arguments)
    return f"{count} launches of {len(kernels)} kernels exact"


def provoke(foreign: list[Place], usable: list[Place], device: str) -> str:
    """Launch a kernel whose device code is for another architecture, with all checks passed by."""
    by_signature = {kernel.signature: (bundle, kernel) for bundle, kernel in usable}
    bundle, kernel = next(
        place
        for place in foreign
        if place[1].signature in by_signature
        and not extra_roles(place[1].signature)
        and not place[1].workspace_bytes
    )
    right = by_signature[kernel.signature]
    convention = parse_calling_convention(kernel.calling_convention)
    assert convention is not None
    require_libraries(bundle.header)
    launcher = native.load()
    handle = launcher.register_kernel(
        id=kernel.id,
        function_address=launcher.open_kernel(
            bundle.payload(kernel), convention.symbol, "the foreign kernel"
        ),
        signature=kernel.signature,
        alignment_bytes=kernel.alignment_bytes,
        target=right[0].header.target,
        convention=convention,
    )
    launch_all([right], device)
    named = error_of_launcher(right, device)
    launch_all([right], device)
    arguments = exact_arguments(edges(kernel.signature, kernel.alignment_bytes)[3], device)
    try:
        launcher.launch(handle, arguments.a, arguments.b, arguments.out, *arguments.others)
        torch.cuda.synchronize()
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    else:
        raise AssertionError(f"a kernel for {bundle.header.target.arch} was launched here")
    launch_all([right], device)  # the process goes on
    library = find_runtime_library("cu13")
    assert library is not None
    assert library.exports is not None
    other = next(place for place in usable if place[1].id != right[1].id)
    try:
        launch_all([other], device)
    except DriverError:
        if RELEASES_ITS_LOCK in library.exports:
            raise
        return f"{named}; {said}; others are refused from then on"
    if RELEASES_ITS_LOCK not in library.exports:
        raise AssertionError("a kernel was loaded by a library that has lost its lock")
    return f"{named}; {said}; others load"


def error_of_launcher(place: Place, device: str) -> str:
    """Have a kernel's own launcher report an error that CUDA returns."""
    bundle, kernel = place
    convention = parse_calling_convention(kernel.calling_convention)
    assert convention is not None
    address = native.load().open_kernel(bundle.payload(kernel), convention.symbol, "the kernel")
    arguments = exact_arguments(edges(kernel.signature, kernel.alignment_bytes)[3], device)
    said = raised_on(NO_DEVICE, address, arguments.a, arguments.b, arguments.out)
    if said != "RuntimeError: CUDA Error: cudaErrorInvalidDevice":
        raise AssertionError(f"a launch on device {NO_DEVICE} ended with {said!r}")
    return said


def refuse(usable: list[Place]) -> str:
    """Launch a kernel for the CPU with operands of a type that none takes."""
    place = next(place for place in usable if place[1].signature.op is Op.MM)
    loaded = load_kernel(place[1].id)
    try:
        loaded.launch(*(torch.zeros(3, 3, dtype=torch.float64) for _ in range(3)))
    except (TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("operands that do not fit were taken")
    launch_all([place], "cpu")
    return said


def main(part: str) -> dict[str, str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts: DeviceFacts = device_facts(device, 0)
    usable: list[Place] = []
    foreign: list[Place] = []
    for found in bundles():
        if found.bundle is None:
            raise RuntimeError(found.problem)
        reason = refusal(found.bundle.header, facts)
        places = [
            (found.bundle, kernel)
            for kernel in found.bundle.header.kernels
            if has_exact_results(kernel.signature)
        ]
        (usable if reason is None else foreign).extend(places)
        if reason is not None and found.bundle.header.target.arch != CPU:
            print(f"{found.path.name}: {reason}", file=sys.stderr)
    if not usable:
        raise RuntimeError(f"no bundle serves {facts.name}")
    if part == "launches":
        said = launch_all(usable, device)
    elif device == "cpu":
        said = refuse(usable)
    else:
        said = provoke(foreign, usable, device)
    library = find_runtime_library("cu13")
    return {
        "result": said,
        "device": facts.name,
        "torch": str(torch.__version__),
        "tvm_ffi": str(tvm_ffi.__version__),
        "tvm_ffi_file": str(tvm_ffi.__file__),
        "library": "none" if library is None else library.version,
        "library_file": "none" if library is None else str(library.path),
    }


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    print(json.dumps(main(sys.argv[1])))
