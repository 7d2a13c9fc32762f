"""A provider whose kernels are a few lines of C: quick to build, and told by name how to behave."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_aot.providers import Candidate, Enumeration, Rejection
from nvgemm_aot.providers.base import INTERFACE_VERSION, BlockShape, RuntimeModel
from nvgemm_aot.providers.heuristics.estimates import MatmulHeuristics
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.errors import CompileError
from nvgemm_runtime.gemm.problem import Signature

_FOREVER_SECONDS = 3600
"""Longer than any test waits, however busy the machine is."""

SOURCE = """
__attribute__((visibility("default")))
int __tvm_ffi_gemm(void *self, const void *arguments, int count, void *result) {{
  return {number};
}}
"""


def candidate(
    operator: str,
    signature: Signature,
    *,
    tile: tuple[int, int, int] = (64, 64, 64),
    cluster: tuple[int, int] = (1, 1),
    cluster_sizes: tuple[int, ...] = (),
    swapped: bool = False,
    preference: int = 0,
    ctas_per_tile: int = 1,
) -> Candidate:
    """A candidate of this provider."""
    return Candidate(
        provider=FakeProvider.name,
        operator=operator,
        signature=signature,
        calling_convention="tvm_ffi:gemm(a,b,out,stream)",
        design=KernelDesign(
            tile=tile,
            ctas_per_tile=ctas_per_tile,
            cluster=cluster,
            fallback_cluster=None,
            scheduler="one_tile" if swapped else "clc",
        ),
        cluster_sizes=cluster_sizes,
        block_shape=BlockShape(tile=tile, cluster=cluster, swapped=swapped),
        preference=preference,
        alignment_bytes=16,
        workspace_bytes=0,
    )


def _make_noise() -> None:
    sys.stdout.write(os.environ.get("FAKE_NOISE", ""))
    sys.stdout.flush()


class FakeProvider:
    """Offers the operators that the environment variable FAKE_OPERATORS names.

    An operator called ``fail...`` does not compile; ``crash...`` kills the compiler process,
    ``dies_once`` the first two times, which is one task: each is tried twice;
    ``slow...`` takes an hour, ``hangs...`` only the first time; ``nospace...`` finds the disk
    full; ``interrupt...`` raises what Ctrl-C does, and no longer ignores that; ``same...`` gives
    the same code as every other of its kind. What FAKE_NOISE says is printed, as compilers do.
    """

    name = "fake_provider:FakeProvider"
    interface = INTERFACE_VERSION
    recipe = "1"

    def toolchain(self) -> dict[str, str]:
        return {"fake": os.environ.get("FAKE_VERSION", "1")}

    def prepare(self) -> None:
        pass

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        names = os.environ.get("FAKE_OPERATORS", "one two three").split()
        _make_noise()
        return Enumeration(
            candidates=tuple(
                candidate(name, signature, tile=(64, 64, 64 + 64 * place))
                for place, name in enumerate(names)
            ),
            rejections=(Rejection(operator="old", reason="it is old"),),
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        device = target.device
        return MatmulHeuristics(
            device.heuristics_gpu,
            device.shared_memory_per_block_bytes.value,
            device.sm_count.value,
        )

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        if log := os.environ.get("FAKE_LOG"):
            with Path(log).open("a") as file:
                file.write(candidate.operator + "\n")
        _make_noise()
        if candidate.operator.startswith("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        if candidate.operator == "dies_once":
            names = Path(os.environ["FAKE_LOG"]).read_text().split()
            if names.count(candidate.operator) <= 2:
                os.kill(os.getpid(), signal.SIGKILL)
        if candidate.operator.startswith("slow"):
            time.sleep(_FOREVER_SECONDS)
        if candidate.operator.startswith("hangs"):
            names = Path(os.environ["FAKE_LOG"]).read_text().split()
            time.sleep(_FOREVER_SECONDS if names.count(candidate.operator) == 1 else 0)
        if candidate.operator.startswith("nospace"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if candidate.operator.startswith("interrupt"):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if candidate.operator.startswith("fail"):
            raise CompileError(f"{candidate.operator}: told to fail")
        text = "same" if candidate.operator.startswith("same") else candidate.operator
        number = sum(ord(letter) << place for place, letter in enumerate(text))
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "kernel.c"
            source.write_text(SOURCE.format(number=number))
            subprocess.run(
                [*c_compiler(), "-c", "-O1", "-fPIC", "-o", "kernel.o", "kernel.c"],
                cwd=directory,
                check=True,
            )
            return (Path(directory) / "kernel.o").read_bytes()
