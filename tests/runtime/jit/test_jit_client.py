"""Asking for kernels: what a user's process sees, whatever happens to those that compile them."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jit_programs import JitMachine, kill, problem, wait_until
from nvgemm_runtime import settings
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.jit import builder, client
from nvgemm_runtime.jit.client import JitClient
from synthetic_facts import H200


def running(fallback: JitClient) -> int:
    assert fallback._process is not None
    return fallback._process.pid


@pytest.mark.slow
def test_kernels_are_compiled_once_and_found_by_the_next_process(machine: JitMachine) -> None:
    first = machine.run(problem(16), problem(64))
    assert first["reasons"] == [None, None]
    assert sum(first["compiled"]) == 3
    assert machine.compiled() == ["one", "three", "two"]
    [bundle] = machine.bundles()
    assert first["bundles"] == [str(bundle)] * 2
    assert not {"nvgemm_aot", "cutlass", "torch"} & set(first["modules"])
    assert first["said"] == ""
    before = bundle.read_bytes()
    second = machine.run(problem(64), problem(16))
    assert second["bundles"] == [str(bundle)] * 2
    assert second["compiled"] == [0, 0]
    assert machine.compiled() == ["one", "three", "two"]
    assert bundle.read_bytes() == before


@pytest.mark.slow
def test_processes_at_once_compile_each_kernel_once(machine: JitMachine) -> None:
    programs = [machine.start(problem(16), problem(16 << place % 3)) for place in range(4)]
    answers = [program.answer() for program in programs]
    assert all(answer["reasons"] == [None, None] for answer in answers), answers
    assert machine.compiled() == ["one", "three", "two"]
    assert sum(sum(answer["compiled"][:2]) for answer in answers) <= 2 * 3
    assert len(machine.bundles()) == 1
    assert not list((machine.cache / "locks").iterdir())
    assert not machine.partial_files()


@pytest.mark.slow
def test_a_problem_is_asked_for_once_a_process(machine: JitMachine, fallback: JitClient) -> None:
    pending = fallback.request(problem(), H200)
    assert fallback.request(problem(), H200) is pending
    assert pending.result(600).reason is None
    assert pending.done()
    assert fallback.request(problem(), H200) is pending


@pytest.mark.slow
def test_waiting_can_be_given_up_and_taken_up_again(
    machine: JitMachine, fallback: JitClient
) -> None:
    pending = fallback.request(problem(), H200)
    assert pending.result(0).reason == "not compiled within 0 s"
    assert pending.result(600).reason is None


@pytest.mark.slow
def test_a_killed_server_is_started_again_once(machine: JitMachine, fallback: JitClient) -> None:
    machine.set(FAKE_OPERATORS="hangs")
    pending = [fallback.request(problem(m), H200) for m in (16, 64)]
    wait_until(machine.compiled, "nothing was compiled")
    first = running(fallback)
    kill(first)
    assert [one.result(600).reason for one in pending] == [None, None]
    assert running(fallback) != first
    kill(running(fallback))
    outcome = fallback.request(problem(128), H200).result(600)
    assert outcome.bundle is None
    assert outcome.reason == "the builder ended (killed by signal 9): it printed no error"
    assert fallback.request(problem(256), H200).result(0).reason == outcome.reason
    assert fallback._process is None


def test_a_killed_compiler_is_replaced(machine: JitMachine, fallback: JitClient) -> None:
    machine.set(FAKE_OPERATORS="one crash two")
    outcome = fallback.request(problem(), H200).result(600)
    assert outcome.reason is None
    assert outcome.compiled == 2
    [failure] = outcome.failures
    assert failure.startswith(
        "crash: the compiler process died by SIGKILL, as when memory is short; "
    )
    assert machine.compiled() == ["crash", "crash", "one", "two"]


@pytest.mark.slow
def test_a_killed_program_takes_everything_with_it_and_the_next_goes_on(
    machine: JitMachine,
) -> None:
    machine.set(FAKE_OPERATORS="one hangs two")
    program = machine.start(problem())
    wait_until(lambda: "hangs" in machine.compiled(), "nothing was compiled")
    assert program.server is not None
    compilers = machine.compilers_of(program.server)
    assert compilers
    program.kill()
    wait_until(lambda: not machine.others(), "the server or a compiler outlives the program")
    assert not machine.bundles()
    assert machine.run(problem())["reasons"] == [None]
    assert machine.compiled().count("hangs") == 2
    assert not machine.partial_files(), "what compilers that were killed had begun is swept"


@pytest.mark.slow
def test_killed_at_any_point_the_bundle_is_whole(machine: JitMachine) -> None:
    machine.set(FAKE_OPERATORS="one two")
    for attempt in range(4):
        program = machine.start(*(problem(16 << size) for size in range(6)))
        time.sleep(0.3 + 0.3 * attempt)
        program.kill()
    answer = machine.run(*(problem(16 << size) for size in range(6)))
    assert answer["reasons"] == [None] * 6
    assert not machine.partial_files()
    assert not list((machine.cache / "jit").glob("*.damaged*"))


@pytest.mark.slow
def test_a_problem_need_not_wait_for_another(machine: JitMachine, fallback: JitClient) -> None:
    machine.set(FAKE_OPERATORS="hangs")
    first = fallback.request(problem(), H200)
    wait_until(machine.compiled, "nothing was compiled")
    other = Problem.parse("mm/tn/fp16xfp16/fp32/fp16/m16n512k256")
    assert fallback.request(other, H200).result(600).reason is None
    assert not first.done()


@pytest.mark.slow
def test_an_idle_server_ends_and_is_started_again(machine: JitMachine) -> None:
    fallback = JitClient(["--idle-seconds", "0.2"])
    for m in (16, 64, 128):
        assert fallback.request(problem(m), H200).result(600).reason is None
        wait_until(lambda: fallback._process is None, "the server does not end")
    fallback.close()


@pytest.mark.slow
def test_a_forked_child_starts_its_own(machine: JitMachine, fallback: JitClient) -> None:
    machine.set(FAKE_OPERATORS="slow")
    open_request = fallback.request(problem(64), H200)
    parents = running(fallback)
    machine.set(FAKE_OPERATORS="one")
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            fallback.forget()
            inherited = open_request.result(0).reason
            fresh = fallback.request(problem(128), H200).result(600)
            right = (
                inherited == "requested by the parent process before a fork"
                and fresh.reason is None
                and running(fallback) != parents
            )
            fallback.close()
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert running(fallback) == parents
    assert not open_request.done()


def test_closing_ends_the_server_though_it_is_busy(
    machine: JitMachine, fallback: JitClient
) -> None:
    machine.set(FAKE_OPERATORS="slow")
    pending = fallback.request(problem(), H200)
    wait_until(machine.compiled, "nothing was compiled")
    fallback.close()
    assert pending.result(0).reason == "this process is ending"
    wait_until(lambda: not machine.others(), "the server does not end")
    assert fallback.request(problem(64), H200).result(0).reason == "this process is ending"


def test_what_compilers_print_is_no_answer_and_not_seen(machine: JitMachine) -> None:
    machine.set(FAKE_NOISE='{"id": 0}\n')
    answer = machine.run(problem())
    assert answer["reasons"] == [None]
    assert answer["said"] == ""


def test_the_server_has_no_gpu_and_writes_nothing_beside_the_program(
    machine: JitMachine, fallback: JitClient, tmp_path: Path
) -> None:
    machine.set(TORCH_TRACE=str(tmp_path / "trace"), CUDA_VISIBLE_DEVICES="0,1")
    assert fallback.request(problem(), H200).result(600).reason is None
    variables = Path(f"/proc/{running(fallback)}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in variables
    assert not [name for name in variables if name.startswith(b"TORCH_TRACE")]
    assert Path(f"/proc/{running(fallback)}/cwd").readlink() == Path("/")


@pytest.mark.slow
def test_a_server_that_does_not_answer_holds_nobody_up(
    machine: JitMachine, fallback: JitClient
) -> None:
    machine.set(FAKE_OPERATORS="slow")
    fallback.request(problem(), H200)
    os.kill(running(fallback), signal.SIGSTOP)
    # More than a pipe takes by default.
    pending = [fallback.request(problem(m), H200) for m in range(17, 400)]
    assert pending[-1].result(0).reason == "not compiled within 0 s"
    fallback.close()
    assert pending[-1].result(0).reason == "this process is ending"


def test_a_server_that_cannot_start_says_why(
    machine: JitMachine, fallback: JitClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zstandard.py").write_text("raise ImportError('broken installation')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    outcome = fallback.request(problem(), H200).result(600)
    assert outcome.bundle is None
    assert "the builder ended (exit status 1): " in str(outcome.reason)
    assert str(outcome.reason).endswith("ImportError: broken installation")


def test_no_python_to_start_is_a_reason(
    machine: JitMachine, fallback: JitClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    outcome = fallback.request(problem(), H200).result(0)
    assert "cannot be started: [Errno 2] No such file or directory" in str(outcome.reason)


def test_a_user_without_a_place_for_a_cache_is_a_reason_each_time(
    machine: JitMachine, fallback: JitClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NVGEMM_AOT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    for _ in range(2):
        reason = str(fallback.request(problem(), H200).result(0).reason)
        assert reason.startswith("StorageError: no directory for the build cache")
    assert fallback._process is None


def test_an_unknown_provider_is_a_reason(machine: JitMachine, fallback: JitClient) -> None:
    machine.set(NVGEMM_AOT_JIT_PROVIDER="nonesuch")
    assert "unknown provider 'nonesuch'" in str(
        fallback.request(problem(), H200).result(600).reason
    )


@pytest.mark.parametrize(
    ("value", "expected"), [("0", 0), ("7", 7), ("-1", 4), ("many", 4), ("", 4), (None, 4)]
)
def test_candidates_are_a_number(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_JIT_CANDIDATES", raising=False)
    if value is not None:
        monkeypatch.setenv("NVGEMM_AOT_JIT_CANDIDATES", value)
    assert settings.jit_candidates() == expected


@pytest.mark.slow
def test_candidates_bound_what_is_compiled(machine: JitMachine, fallback: JitClient) -> None:
    machine.set(NVGEMM_AOT_JIT_CANDIDATES="2")
    assert fallback.request(problem(), H200).result(600).compiled == 2
    machine.set(NVGEMM_AOT_JIT_CANDIDATES="0")
    outcome = fallback.request(problem(64), H200).result(0)
    assert outcome.reason == "NVGEMM_AOT_JIT_CANDIDATES is 0"


def test_what_is_missing_is_named_and_nothing_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_JIT_PROVIDER", raising=False)
    monkeypatch.setattr(builder, "is_installed", lambda module: module != "pydantic")
    monkeypatch.setattr(client, "missing_module", client.missing_module.__wrapped__)
    fallback = JitClient()
    reason = fallback.request(problem(), H200).result(0).reason
    assert reason == (
        "the builder is not installed: no pydantic; run: pip install '.[build]' in "
        "nvgemm-aot's checkout, or with the path of its wheel in place of the dot"
    )
    assert fallback._process is None


@pytest.mark.parametrize("provider", [None, "quack"])
def test_on_arm_the_linker_is_part_of_the_builder_side(
    provider: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_JIT_PROVIDER", raising=False)
    if provider is not None:
        monkeypatch.setenv("NVGEMM_AOT_JIT_PROVIDER", provider)
    monkeypatch.setattr(client, "missing_module", lambda: None)
    monkeypatch.setattr(client, "is_installed", lambda module: module != "ziglang")
    assert client.why_not_compiling(H200) is None
    on_arm = replace(H200, platform="linux_aarch64")
    assert client.why_not_compiling(on_arm) == (
        "the builder is not installed: no ziglang; run: pip install '.[build,cross]' in "
        "nvgemm-aot's checkout, or with the path of its wheel in place of the dot"
    )
    monkeypatch.setattr(client, "is_installed", lambda module: True)
    assert client.why_not_compiling(on_arm) is None
