"""From a request to a launch, with kernels for the CPU; real kernels as far as the bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import cpu_provider
from jit_programs import JitMachine
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.jit.client import JitClient
from nvgemm_runtime.matching.device import device_facts
from synthetic_facts import H200

LAUNCH = """
import json, sys
import torch
import nvgemm_runtime
a, b = torch.randn(16, 64), torch.randn(64, 32)
before = nvgemm_runtime.explain(a, b)
result = nvgemm_runtime.mm(a, b)
modules = {name.split(".")[0] for name in sys.modules}
print(json.dumps({
    "right": torch.allclose(result, a @ b, rtol=1e-4, atol=1e-4),
    "basis": before.match.basis.value,
    "from_jit": before.match.from_jit,
    "builder": sorted(modules & {"nvgemm_aot", "cutlass", "nvMatmulHeuristics"}),
    "client": "nvgemm_runtime.jit.client" in sys.modules,
}))
"""


def launch() -> dict[str, Any]:
    """Run a program that knows nothing of all this."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCH],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
def test_the_next_process_launches_what_was_compiled_and_imports_no_compiler(
    machine: JitMachine, fallback: JitClient
) -> None:
    machine.set(NVGEMM_AOT_JIT_PROVIDER=cpu_provider.CpuProvider.name)
    wanted = cpu_provider.problem("tt", sizes=(16, 32, 64))
    outcome = fallback.request(wanted, device_facts("cpu", 0)).result(60)
    assert outcome.reason is None
    stamps = list(machine.cache.glob("jit/used/*"))
    assert len(stamps) == 1
    os.utime(stamps[0], (0, 0))
    assert launch() == {
        "right": True,
        "basis": "declared",
        "from_jit": True,
        "builder": [],
        "client": False,
    }
    assert stamps[0].stat().st_mtime > 0, "its use is marked"


def test_the_cpu_has_no_kernels_but_for_tests(
    machine: JitMachine, fallback: JitClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_JIT_PROVIDER")
    outcome = fallback.request(cpu_provider.problem(), device_facts("cpu", 0)).result(0)
    assert outcome.reason == "nothing compiles kernels for the CPU"
    assert not machine.others()


@pytest.mark.slow
def test_by_default_real_kernels_of_all_providers_compete(
    machine: JitMachine, fallback: JitClient, monkeypatch: pytest.MonkeyPatch, kernel_cache: Cache
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_JIT_PROVIDER")
    machine.set(NVGEMM_AOT_CACHE=str(kernel_cache.directory), NVGEMM_AOT_JIT_CANDIDATES="1")
    wanted = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096")
    outcome = fallback.request(wanted, H200).result(120)
    assert outcome.reason is None
    assert outcome.bundle is not None
    assert verify_bundle(outcome.bundle).ok
    with Bundle(outcome.bundle) as kept:
        ranking = next(one for one in kept.header.rankings if one.problem == wanted)
        assert kept.header.kernels[ranking.kernels[0].kernel].provider == "quack"
