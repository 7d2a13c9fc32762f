"""Kernels that are compiled at run time, on a GPU, with the builder installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import installed_kernels

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.jit import client
from nvgemm_runtime.matching.device import device_facts

_PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from user_program import slow_down_aten

dtype, layout = getattr(torch, sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
def sparse(*shape):
    return (torch.rand(*shape, device="cuda") < 0.05).to(dtype)
a, b = sparse(48, 640), sparse(640, 768)
c = sparse(640, 1536)
if layout[0] == "n":
    a = a.t().contiguous().t()
if layout[1] == "n":
    b, c = b.t().contiguous().t(), c.t().contiguous().t()
slow_down_aten("cuda")
def model(a, b, c):
    return a @ b, a @ c
options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}
error = None
try:
    results = torch.compile(model, options=options, dynamic=False)(a, b, c)
    right = all(torch.equal(r.double(), a.double() @ x.double()) for r, x in zip(results, (b, c)))
except Exception as caught:
    right, error = False, str(caught)
import nvgemm_runtime
from nvgemm_runtime.jit.client import CLIENT
stats = nvgemm_runtime.stats()
builder = {"nvgemm_aot", "cutlass"} & {name.split(".")[0] for name in sys.modules}
print(json.dumps({
    "right": right, "error": error, "declared": stats.declared, "jit": stats.jit,
    "kernels": stats.jit_kernels, "misses": dict(stats.misses), "won": sum(stats.won.values()),
    "ms": dict(stats.milliseconds), "server": CLIENT._process is not None,
    "builder": sorted(builder),
}))
"""
"""Two GEMMs of one signature, exact in half precision, in which ATen loses."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@pytest.fixture(scope="module")
def uncovered() -> tuple[str, str]:
    """Type and layout of GEMMs that no installed wheel serves."""
    reason = client.why_not_compiling(device_facts("cuda", torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    served = {kernel.signature.key for _, kernel in installed_kernels()}
    for layout in ("nn", "nt", "tt", "tn"):
        for short, dtype in DTYPES.items():
            if f"mm/{layout}/{short}x{short}/fp32/{short}" not in served:
                return dtype, layout
    pytest.skip("installed wheels serve every type and layout that is tried here")


class Machine:
    """Programs that share a cache of kernels."""

    def __init__(self, directory: Path, uncovered: tuple[str, str]) -> None:
        self.directory = directory
        self.uncovered = uncovered
        self._runs = 0

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """Start the program, without compile caches."""
        self._runs += 1
        environment = {
            **os.environ,
            "NVGEMM_AOT_CACHE": str(self.directory / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / f"inductor-{self._runs}"),
            **variables,
        }
        return subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                _PROGRAM,
                Path(__file__).parent,
                *self.uncovered,
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, **variables: str) -> dict[str, Any]:
        """Run it."""
        return answer(self.start(**variables))

    def kept(self) -> tuple[int, int]:
        """How many problems and kernels the user bundle has."""
        (path,) = (self.directory / "cache" / "jit").glob("*.nvgemm")
        with Bundle(path) as bundle:
            bundle.check_body()
            return len(bundle.header.rankings), len(bundle.header.kernels)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


@pytest.fixture
def machine(tmp_path: Path, uncovered: tuple[str, str]) -> Machine:
    return Machine(tmp_path, uncovered)


def test_kernels_are_compiled_once_for_all_processes(machine: Machine) -> None:
    refused = machine.run(NVGEMM_AOT="required")
    assert "RequiredError: mm/" in refused["error"]
    assert not refused["server"]

    first = machine.run()
    assert first["right"]
    assert (first["jit"], first["misses"], first["won"], first["builder"]) == (2, {}, 2, [])
    assert machine.kept() == (2, first["kernels"])

    for mode in ("auto", "required"):
        later = machine.run(NVGEMM_AOT=mode)
        assert (later["right"], later["error"], later["declared"]) == (True, None, 2)
        assert (later["jit"], later["server"], later["builder"]) == (0, False, [])


def test_eight_processes_at_once_compile_each_kernel_once(machine: Machine) -> None:
    answers = [answer(program) for program in [machine.start() for _ in range(8)]]
    assert all(one["right"] and one["won"] == 2 for one in answers)
    problems, kernels = machine.kept()
    assert problems == 2
    assert sum(one["kernels"] for one in answers) == kernels


def test_a_process_that_is_killed_while_it_compiles_leaves_nothing_half(machine: Machine) -> None:
    killed = machine.start()
    cache = machine.directory / "cache"
    while killed.poll() is None and not list((cache / "locks").glob("*")):
        pass
    assert killed.poll() is None
    killed.kill()
    killed.communicate()
    after = machine.run()
    assert after["right"]
    assert machine.kept()[0] == 2
    assert not list(cache.rglob("*.partial"))
