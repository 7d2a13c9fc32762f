"""GEMMs that no bundle covers, under torch.compile: compiled once, kept, found by later processes.

Kernels are those of `cpu_provider`, compiled by the builder beside the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import cpu_provider
import nvgemm_runtime
from inductor_session import InductorSession
from jit_programs import JitMachine
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.main import main
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.ranking_entries import CompileFailure
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import DType, Problem
from nvgemm_runtime.jit import client
from nvgemm_runtime.jit.client import JitResult, Pending
from nvgemm_runtime.matching.device import DeviceFacts
from repository import SUPPORT

_PROGRAM = """
import gc, json, sys, time
gc.disable()  # as in `fresh_processes`
import torch
gc.freeze(); gc.enable()
from torch._inductor.select_algorithm import extern_kernels

def model(a, b, c):
    return a @ b, a @ c

extern_kernels.mm = lambda *arguments, **options: (
    time.sleep(0.02), torch.mm(*arguments, **options)
)[1]
a = torch.ones(16, 64).bfloat16()
b, c = torch.full((64, 32), 2.0).bfloat16(), torch.full((128, 64), 3.0).bfloat16().t()
compiled = torch.compile(model, options={"max_autotune_gemm": True})
error = None
try:
    right = all(map(torch.equal, compiled(a, b, c), model(a, b, c)))
except Exception as caught:
    right, error = False, str(caught)
import nvgemm_runtime
from nvgemm_runtime.jit.client import CLIENT
stats = nvgemm_runtime.stats()
print(json.dumps({
    "right": right,
    "error": error,
    "declared": stats.declared,
    "signature": stats.signature,
    "jit": stats.jit,
    "kernels": stats.jit_kernels,
    "misses": dict(stats.misses),
    "won": sum(stats.won.values()),
    "hits": torch._dynamo.utils.counters["inductor"].get("fxgraph_cache_hit", 0),
    "server": CLIENT._process is not None,
    "builder": sorted(
        {name.split(".")[0] for name in sys.modules} & {"nvgemm_aot", "nvMatmulHeuristics"}
    ),
}))
gc.freeze()
"""
"""A user's program of two GEMMs, in which ATen loses; what it prints comes after."""

BOTH = {
    Problem.parse("mm/tt/bf16xbf16/fp32/bf16/m16n32k64"),
    Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m16n128k64"),
}


class Machine(JitMachine):
    """A machine on which programs compile for its CPU."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, monkeypatch)
        self.directory = directory
        self.set(
            NVGEMM_AOT_JIT_PROVIDER=cpu_provider.CpuProvider.name,
            PYTHONPATH=str(SUPPORT),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS="ATEN",
        )

    def start_compiling(self, caches: str, **variables: str) -> subprocess.Popen[str]:
        """Start the program, with compile caches of this name."""
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(self.directory / caches),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def compile(self, caches: str, **variables: str) -> dict[str, Any]:
        """Run it."""
        return answer(self.start_compiling(caches, **variables))

    def kept(self) -> tuple[set[Problem], int]:
        """What the user bundle declares, and how many kernels it holds."""
        (path,) = self.bundles()
        with Bundle(path) as bundle:
            bundle.check_body()
            header = bundle.header
            return {ranking.problem for ranking in header.rankings}, len(header.kernels)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path, monkeypatch)
    with machine.ending_quietly():
        yield machine


@pytest.mark.slow
def test_what_is_compiled_once_serves_all_later_processes(machine: Machine) -> None:
    first = machine.compile("one")
    assert first["right"]
    assert (first["jit"], first["misses"], first["won"]) == (2, {}, 2)
    assert first["builder"] == []
    assert machine.kept() == (BOTH, first["kernels"])
    assert first["kernels"] == 2 * len(cpu_provider.TILES)

    second = machine.compile("two")
    assert (second["right"], second["declared"], second["jit"]) == (True, 2, 0)
    assert (second["won"], second["server"], second["builder"]) == (2, False, [])

    warm = machine.compile("one")
    assert (warm["right"], warm["hits"], warm["server"]) == (True, 1, False)

    CliRunner().invoke(main, ["cache", "clear"], catch_exceptions=False)
    cleared = machine.compile("one")
    assert (cleared["right"], cleared["hits"], cleared["jit"], cleared["won"]) == (True, 0, 2, 2)


@pytest.mark.slow
def test_processes_at_once_compile_each_kernel_once(machine: Machine) -> None:
    programs = [machine.start_compiling(str(number)) for number in range(2)]
    answers = [answer(program) for program in programs]
    assert all(one["right"] for one in answers)
    assert all((one["misses"], one["won"]) == ({}, 2) for one in answers)
    problems, kernels = machine.kept()
    assert problems == BOTH
    assert sum(one["kernels"] for one in answers) == kernels == 2 * len(cpu_provider.TILES)


@pytest.mark.slow
def test_without_a_builder_side_aten_computes_and_it_is_counted(machine: Machine) -> None:
    missing = machine.compile("one", NVGEMM_AOT_JIT_PROVIDER="")  # none is for the CPU
    assert (missing["right"], missing["won"], missing["server"]) == (True, 0, False)
    assert sum(missing["misses"].values()) == 2


@pytest.mark.slow
def test_a_provider_that_cannot_be_had_costs_our_choices_alone(machine: Machine) -> None:
    broken = machine.compile("one", NVGEMM_AOT_JIT_PROVIDER="nowhere:Nothing")
    assert (broken["right"], broken["won"]) == (True, 0)
    assert sum(broken["misses"].values()) == 2


class Asked:
    """Stands in for the builder: writes down what is asked for, and answers no."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def request(self, problem: Problem, facts: DeviceFacts) -> Pending:
        assert facts.kind == "cpu"
        self.told.append(f"ask {problem.key}")
        asked = self

        class Waited(Pending):
            def result(self, timeout: float | None = None) -> JitResult:
                assert timeout
                asked.told.append(f"wait {problem.key}")
                return JitResult(problem=problem, reason="nobody compiles here")

        return Waited(problem)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(client, "request", asked.request)
    monkeypatch.setattr(client, "find_request", lambda *_: None)
    return asked


def two(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a @ b, torch.bmm(a.view(2, 8, 64), b.view(2, 64, 16))


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 64).bfloat16(), torch.randn(64, 32).bfloat16()


MM, BMM = "mm/tt/bf16xbf16/fp32/bf16/m16n32k64", "bmm/tt/bf16xbf16/fp32/bf16/b2m8n16k64"


def test_all_of_a_graph_is_asked_for_before_the_first_is_waited_for(
    inductor: InductorSession, asked: Asked, operands: tuple[torch.Tensor, torch.Tensor]
) -> None:
    inductor.use()
    inductor.compile(two, *operands)
    asks = [line for line in asked.told if line.startswith("ask")]
    assert set(asks) == {f"ask {MM}", f"ask {BMM}"}
    assert asked.told[:2] == [f"ask {MM}", f"ask {BMM}"]
    assert {f"wait {MM}", f"wait {BMM}"} <= set(asked.told)


def test_why_nothing_was_compiled_is_told_first(
    inductor: InductorSession,
    asked: Asked,
    operands: tuple[torch.Tensor, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inductor.use()
    caplog.set_level("DEBUG", logger="nvgemm_runtime")
    inductor.compile(two, *operands)
    misses = [line for line in caplog.messages if ": no bundled kernel: " in line]
    assert len(misses) == 2
    assert all(": nothing was compiled: nobody compiles here; " in line for line in misses)


@pytest.mark.parametrize("why", ["required", "off", "no max-autotune", "fp32", "NVGEMM"])
def test_nothing_is_asked_for_where_nothing_may_be_compiled(
    inductor: InductorSession,
    asked: Asked,
    operands: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    from nvgemm_runtime.inductor.autotuning import torch_nvgemm

    inductor.use()
    options: dict[str, Any] = {}
    if why in ("required", "off"):
        options = {"nvgemm_aot_mode": why}
    elif why == "no max-autotune":
        options = {"max_autotune_gemm": False}
    elif why == "fp32":
        operands = (operands[0].float(), operands[1].float())
    else:
        monkeypatch.setattr(torch_nvgemm, "compiles_itself", lambda _: True)
    expected = torch._inductor.exc.InductorError if why == "required" else ()
    with contextlib.suppress(expected):
        inductor.compile(two, *operands, options=options)
        assert why != "required"
    assert asked.told == []


def test_required_opens_no_connection_to_a_remote_cache(
    inductor: InductorSession,
    operands: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE", f"redis://127.0.0.1:{port}")
        monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1")
        inductor.use()
        with pytest.raises(torch._inductor.exc.InductorError):
            inductor.compile(two, *operands, options={"nvgemm_aot_mode": "required"})
        assert client.CLIENT._process is None, "what would connect"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_what_a_wheel_has_for_other_sizes_is_enough(
    inductor: InductorSession, asked: Asked, kernel_cache: Cache, tmp_path: Path
) -> None:
    served = cpu_provider.problem(operand=DType.BF16)
    inductor.use(cpu_provider.build_bundle([served], tmp_path, kernel_cache).path)
    a, b = torch.randn(48, 64).bfloat16(), torch.randn(64, 32).bfloat16()
    nvgemm_runtime.reset_stats()
    inductor.compile(lambda a, b: a @ b, a, b)
    assert nvgemm_runtime.stats().signature == 1
    assert asked.told == []


@pytest.mark.parametrize("is_transient", [True, False])
def test_a_kept_ranking_that_lost_kernels_to_a_killed_compiler_is_asked_for_again(
    inductor: InductorSession,
    asked: Asked,
    kernel_cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operands: tuple[torch.Tensor, torch.Tensor],
    is_transient: bool,
) -> None:
    built = cpu_provider.build_bundle([Problem.parse(MM)], tmp_path, kernel_cache)
    with Bundle(built.path) as bundle:
        content = read_content(bundle)
    failure = CompileFailure(operator="o", reason="killed", is_transient=is_transient)
    (ranking,) = content.rankings
    kept = tmp_path / "cache/jit/kept.nvgemm"
    kept.parent.mkdir(parents=True)
    write_bundle(kept, replace(content, rankings=(replace(ranking, missing=(failure,)),)))
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    inductor.use()
    nvgemm_runtime.reset_stats()
    inductor.compile(lambda a, b: a @ b, *operands)
    assert nvgemm_runtime.stats().declared == 1, "its other kernels are offered"
    assert (f"ask {MM}" in asked.told) is is_transient
    assert f"wait {MM}" not in asked.told, "some kernels are there"
