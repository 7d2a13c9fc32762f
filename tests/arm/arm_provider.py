"""The tests' kernels for the CPU, compiled for Arm on whatever machine this is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import cpu_kernels
import cpu_provider
from cpu_provider import TILES, CpuProvider
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.providers import Candidate
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime.errors import CompileError
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.target import Target

PLATFORM = "linux_aarch64"
TARGET = BuildTarget(
    target=Target(arch="cpu", platform=PLATFORM),
    device=replace(cpu_provider.CPU_PROFILE, platform=PLATFORM),
)
COMPILER = (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28")


class ForArm(CpuProvider):
    """The kernels of `CpuProvider`, from zig's Clang."""

    name = "arm_provider:ForArm"

    def toolchain(self) -> dict[str, str]:
        done = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=True)
        return {"cc": done.stdout.splitlines()[0]}

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        text = cpu_kernels.source(
            candidate.signature,
            cpu_provider.demand_layout(candidate.signature),
            TILES[candidate.operator],
        )
        flags = ["-std=c99", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", "-w"]
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "kernel.c").write_text(text)
            command = [*COMPILER, *flags, "-c", "-o", "kernel.o", "kernel.c"]
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise CompileError(f"{candidate.operator}: {done.stderr}")
            return (Path(directory) / "kernel.o").read_bytes()


EVERY_KIND = (*cpu_provider.SIGNATURES, *cpu_provider.FUSED)


def build_bundle(directory: Path, served: Iterable[Signature] = EVERY_KIND) -> Path:
    """Build a bundle of two kernels for one problem of each signature."""
    problems = [cpu_provider.problem_of(signature) for signature in served]
    declared = replace(cpu_provider.manifest(problems, name="arm", candidates=2), targets=(TARGET,))
    cache = Cache(directory / "cache")
    return build(declared, directory, cache, provider=ForArm()).bundles[0].path
