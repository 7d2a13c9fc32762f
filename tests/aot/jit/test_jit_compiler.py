"""Compiling single problems into user bundles: candidates that fail, places that cannot be used."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import two_providers
from compile_tasks import tasks
from counted_starts import bound_starts
from fake_provider import FakeProvider
from inductor_session import warnings_of
from jit_programs import JitMachine, problem, wait_until
from jit_requests import DEVICE, manifest_of
from made_rankings import entry, rankings
from nvgemm_aot.jit import server
from nvgemm_aot.jit.jit_compiler import Compiled, JitCompiler, LimitedAttempts
from nvgemm_aot.jit.server import Server
from nvgemm_aot.pipeline import compiler as build_compiler
from nvgemm_aot.pipeline.compiler import TaskResult, compile_all
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.pipeline.workers import TimeLimitExceeded, WorkerDied
from nvgemm_aot.providers import load_provider
from nvgemm_aot.providers.cutlass_operators import CutlassOperators
from nvgemm_aot.providers.gathered import Gathered
from nvgemm_aot.providers.quack import Quack
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.remote.remote_cache import RemoteCache
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import StorageError, TargetError, ToolchainError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.jit_cache import stamp_path
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.jit.client import JitClient
from nvgemm_runtime.matching.matches import Basis, Match
from synthetic_facts import H200


@pytest.fixture
def warned() -> list[str]:
    """What the compiler tells the user."""
    return []


@pytest.fixture
def compiler(machine: JitMachine, warned: list[str]) -> Iterator[JitCompiler]:
    compiler = JitCompiler(Cache(machine.cache), FakeProvider(), 2, warned.append)
    yield compiler
    compiler.close()


def problems_of(bundle: Path | None) -> list[Problem]:
    assert bundle is not None
    with Bundle(bundle) as opened:
        opened.check_body()
        return [ranking.problem for ranking in opened.header.rankings]


def test_a_user_bundle_holds_what_a_build_would_make(
    machine: JitMachine, compiler: JitCompiler, tmp_path: Path
) -> None:
    outcome = compiler.compile(problem(), 2, DEVICE)
    assert (outcome.compiled, outcome.reason, outcome.failures) == (2, None, ())
    manifest = manifest_of(problem(), candidates=2)
    built = build(manifest, tmp_path / "out", Cache(machine.cache), provider=FakeProvider())
    assert built.compiled == 0, "a build finds them in the same cache"
    assert outcome.bundle is not None
    assert stamp_path(machine.cache, problem()).exists(), "where the runtime looks"
    with Bundle(outcome.bundle) as user, Bundle(built.bundles[0].path) as shipped:
        assert user.header.device == shipped.header.device == "H200"
        assert user.header.target == shipped.header.target
        assert user.header.toolchain == shipped.header.toolchain
        assert user.header.rankings == shipped.header.rankings
        for ours, theirs in zip(user.header.kernels, shipped.header.kernels):
            assert replace(ours, span=theirs.span) == theirs
            assert user.payload(ours) == shipped.payload(theirs)


def test_kernels_of_several_providers_come_from_processes_of_their_own(
    machine: JitMachine, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    machine.set(**{two_providers.NOTES: str(notes)})
    compiler = JitCompiler(Cache(machine.cache), load_provider(two_providers.BOTH), 2, print)
    outcome = compiler.compile(problem(), 4, DEVICE)
    compiler.close()
    assert (outcome.compiled, outcome.reason, outcome.failures) == (4, None, ())
    assert outcome.bundle is not None
    with Bundle(outcome.bundle) as user:
        providers = {kernel.provider for kernel in user.header.kernels}
    found = two_providers.processes_by_provider(notes)
    assert providers == found.keys() == {two_providers.First.name, two_providers.Second.name}
    assert not set.intersection(*found.values())


def test_a_candidate_that_fails_does_not_keep_the_others_out(
    machine: JitMachine, compiler: JitCompiler
) -> None:
    machine.set(FAKE_OPERATORS="one fails two")
    outcome = compiler.compile(problem(), 4, DEVICE)
    assert outcome.compiled == 2
    [failure] = outcome.failures
    assert (failure.task.candidate.operator, failure.reason) == ("fails", "fails: told to fail")
    assert problems_of(outcome.bundle) == [problem()]


def test_a_problem_whose_candidates_all_fail_says_why_and_is_not_tried_again(
    machine: JitMachine, compiler: JitCompiler
) -> None:
    machine.set(FAKE_OPERATORS="fail1 fail2")
    outcome = compiler.compile(problem(), 4, DEVICE)
    assert outcome.bundle is None
    assert "none of 2 operators compiles" in str(outcome.reason)
    assert "fail1 and 1 more of provider" in str(outcome.reason)
    assert str(outcome.reason).endswith("told to fail")
    assert not machine.bundles()
    machine.set(FAKE_OPERATORS="one two")
    assert compiler.compile(problem(), 4, DEVICE).reason == outcome.reason
    assert compiler.compile(problem(), 3, DEVICE).compiled == 2, "another request"


@pytest.mark.slow
def test_what_a_killed_compiler_left_out_is_compiled_when_asked_again(
    machine: JitMachine, compiler: JitCompiler
) -> None:
    machine.set(FAKE_OPERATORS="one dies_once two")
    first = compiler.compile(problem(), 4, DEVICE)
    assert first.compiled == 2
    again = compiler.compile(problem(), 4, DEVICE)
    assert (again.compiled, again.failures) == (1, ())
    assert compiler.compile(problem(), 4, DEVICE).compiled == 0
    assert problems_of(again.bundle) == [problem()]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["crash", pytest.param("slow", marks=pytest.mark.slow)])
def test_what_was_killed_is_tried_again(
    machine: JitMachine, compiler: JitCompiler, operator: str
) -> None:
    machine.set(FAKE_OPERATORS=operator)
    if operator == "slow":
        machine.set(NVGEMM_AOT_COMPILE_TIMEOUT="1")
    first = compiler.compile(problem(), 4, DEVICE)
    assert first.bundle is None
    assert first.is_transient
    tried = machine.compiled().count(operator)
    assert tried > 0
    assert compiler.compile(problem(), 4, DEVICE) == first
    assert machine.compiled().count(operator) == 2 * tried


@pytest.mark.slow
def test_a_kernel_whose_compiler_is_always_killed_is_given_up_for_a_day(
    machine: JitMachine, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set(FAKE_OPERATORS="crash")

    def in_a_new_process(m: int) -> Compiled:
        compiler = JitCompiler(Cache(machine.cache), FakeProvider(), 2, warned.append)
        made = compiler.compile(problem(m), 4, DEVICE)
        compiler.close()
        return made

    for m in (16, 32):
        assert "given up" not in str(in_a_new_process(m).reason)
    tried = len(machine.compiled())
    made = in_a_new_process(16)
    assert "the compiler process died by SIGKILL, as when memory is short; " in str(made.reason)
    assert "; given up for a day after 2 attempts" in str(made.reason)
    assert "given up" in str(in_a_new_process(48).reason), "for whatever problem"
    machine.set(FAKE_OPERATORS="crash one")
    made = in_a_new_process(64)
    assert made.compiled == 1, "the others are compiled"
    assert len(machine.compiled()) == tried + 1
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    assert "given up" not in str(in_a_new_process(16).failures)
    assert machine.compiled().count("crash") > tried


def test_a_higher_time_limit_gives_a_kernel_another_chance(machine: JitMachine) -> None:
    machine.set(NVGEMM_AOT_COMPILE_TIMEOUT="1")
    wanted, cache = tasks("slow"), Cache(machine.cache)

    class Late:
        """Workers that take too long."""

        def run(self, items: Any, /) -> Iterator[tuple[Any, WorkerDied]]:
            for item in items:
                yield item, TimeLimitExceeded("not done within 1 s")

    def given_up() -> bool:
        late = LimitedAttempts(Late(), cache)
        [failure] = compile_all(wanted, cache, jobs=1, workers=late).failures
        return "given up" in failure.reason

    assert [given_up() for _ in range(3)] == [False, False, True]
    machine.set(NVGEMM_AOT_COMPILE_TIMEOUT="2")
    assert not given_up()


def test_compilers_that_cannot_start_are_started_a_few_times_and_no_more(
    machine: JitMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    (tmp_path / "dying_provider.py").write_text(
        f"import os\nopen({str(starts)!r}, 'a').write('start\\n')\n"
        "os.write(2, b'no such library')\nos._exit(127)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FakeProvider, "name", "dying_provider:DyingProvider")
    bound_starts(monkeypatch, 4)
    compiler = JitCompiler(Cache(machine.cache), FakeProvider(), 1, print)
    for m in range(16, 80, 16):
        with pytest.raises(ToolchainError, match=r"cannot be started: .*127: no such library"):
            compiler.compile(problem(m), 4, DEVICE)
    compiler.close()
    assert 3 <= len(starts.read_text().split()) <= 4


def test_a_problem_that_no_operator_takes_says_why(
    machine: JitMachine, compiler: JitCompiler
) -> None:
    outcome = compiler.compile(problem(k=250), 4, DEVICE)
    assert outcome.bundle is None
    assert "contiguous along k = 250" in str(outcome.reason)
    assert not machine.compiled()


def test_a_device_that_nothing_compiles_for_says_so(compiler: JitCompiler) -> None:
    with pytest.raises(TargetError, match=r"compute capability 8\.0: kernels are compiled for sm_"):
        compiler.compile(problem(), 4, replace(DEVICE, name="A100", capability=(8, 0)))


def test_the_family_is_tried_first_and_then_the_very_architecture(
    compiler: JitCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    b200 = replace(DEVICE, name="NVIDIA B200", capability=(10, 0), multiprocessors=148)
    enumerate_all = FakeProvider.enumerate

    def only_exact(self: FakeProvider, signature: Any, target: Any) -> Any:
        offered = enumerate_all(self, signature, target)
        return replace(offered, candidates=()) if target.target.suffix == "f" else offered

    family = compiler.compile(problem(16), 1, b200).bundle
    monkeypatch.setattr(FakeProvider, "enumerate", only_exact)
    exact = compiler.compile(problem(64), 1, b200).bundle
    assert family is not None
    assert exact is not None
    assert family.name.startswith("sm_100f-linux_x86_64-cu13-")
    assert exact.name.startswith("sm_100a-linux_x86_64-cu13-")


def test_two_toolchains_have_a_bundle_each(
    machine: JitMachine, compiler: JitCompiler, warned: list[str]
) -> None:
    first = compiler.compile(problem(), 4, DEVICE)
    machine.set(FAKE_VERSION="2")
    second = compiler.compile(problem(), 4, DEVICE)
    assert second.compiled == 3
    assert machine.bundles() == sorted(filter(None, {first.bundle, second.bundle}))
    assert len(machine.bundles()) == 2
    assert not warned


@pytest.mark.parametrize("byte", [60, -1])
def test_a_damaged_user_bundle_is_moved_aside_and_made_anew(
    machine: JitMachine, compiler: JitCompiler, warned: list[str], byte: int
) -> None:
    bundle = compiler.compile(problem(), 4, DEVICE).bundle
    assert bundle is not None
    good = bundle.read_bytes()
    broken = bytearray(good)
    broken[byte] ^= 1
    bundle.write_bytes(broken)
    outcome = compiler.compile(problem(), 4, DEVICE)
    assert outcome == Compiled(bundle=bundle)
    assert bundle.read_bytes() == good
    [aside] = machine.cache.glob("jit/*.damaged-*")
    assert aside.read_bytes() == broken
    [said] = warned
    assert aside.name in said
    assert "-digest]" in said
    compiler.compile(problem(64), 4, DEVICE)
    assert len(warned) == 1


def test_only_the_last_damaged_bundles_are_kept(machine: JitMachine, compiler: JitCompiler) -> None:
    for count in range(4):
        bundle = compiler.compile(problem(), 4, DEVICE).bundle
        assert bundle is not None
        bundle.write_bytes(b"damaged %d" % count)
    compiler.compile(problem(), 4, DEVICE)
    kept = sorted(path.read_bytes() for path in machine.cache.glob("jit/*.damaged-*"))
    assert kept == [b"damaged 2", b"damaged 3"]


def test_kernels_that_others_could_change_are_not_put_there(
    machine: JitMachine, compiler: JitCompiler
) -> None:
    machine.cache.mkdir()
    machine.cache.chmod(0o777)
    with pytest.raises(StorageError, match=r"could not be trusted: .*run: chmod go-w"):
        compiler.compile(problem(), 4, DEVICE)
    assert not machine.compiled()


def test_what_another_process_compiled_meanwhile_is_not_counted(machine: JitMachine) -> None:
    class Late:
        """Workers that find everything done."""

        def run(self, items: Any, /) -> Iterator[tuple[Any, TaskResult]]:
            for item in items:
                cache.put(item.key, b"code")
                yield item, TaskResult(was_there=True)

    wanted, cache = tasks("one", "two"), Cache(machine.cache)
    assert compile_all(wanted, cache, jobs=1, workers=Late()).compiled == 0


def read_only(machine: JitMachine) -> None:
    """Name a directory that cannot be made, whoever this user is."""
    (machine.cache.parent / "file").touch()
    machine.set(NVGEMM_AOT_CACHE=str(machine.cache.parent / "file" / "cache"))


@pytest.mark.slow
def test_where_nothing_can_be_written_kernels_are_for_this_process_alone(
    machine: JitMachine, fallback: JitClient, caplog: pytest.LogCaptureFixture
) -> None:
    read_only(machine)
    with caplog.at_level(logging.DEBUG, "nvgemm_runtime"):
        outcomes = [fallback.request(problem(m), H200).result(600) for m in (16, 64)]
    assert [outcome.reason for outcome in outcomes] == [None, None]
    [warning] = warnings_of(caplog)
    assert "serve this process only" in warning
    assert "Not a directory" in warning
    bundle = outcomes[1].bundle
    assert problems_of(bundle) == [problem(16), problem(64)]
    installation = Installation()
    installation.refresh_user_bundles(bundle)
    found = installation.index(H200).match(problem(16), 16)
    assert isinstance(found, Match)
    assert found.from_jit
    fallback.close()
    assert bundle is not None
    wait_until(lambda: not bundle.parent.parent.exists(), "the server leaves its directory behind")


class Served:
    """Requests to a server in this process, one after the other."""

    def __init__(self, cache: Path) -> None:
        self._answers, theirs = os.pipe()
        self._theirs = theirs
        self._cache = cache
        self.server = Server(theirs)

    def ask(self, wanted: Problem) -> dict[str, Any]:
        device = {name: getattr(DEVICE, name) for name in DEVICE.__dataclass_fields__}
        request = {"id": 1, "problem": wanted.key, "candidates": 4, "device": device}
        self.server.take({**request, "cache": str(self._cache)})
        answer: dict[str, Any] = json.loads(os.read(self._answers, 1 << 16))
        return answer

    def close(self) -> None:
        self.server.close()
        os.close(self._answers)
        os.close(self._theirs)


@pytest.fixture
def served(machine: JitMachine) -> Iterator[Served]:
    served = Served(machine.cache)
    yield served
    served.close()


def test_a_disk_that_becomes_full_leaves_nothing_half_written(
    machine: JitMachine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.ask(problem(16))["reason"] is None
    [bundle] = machine.bundles()
    good = bundle.read_bytes()
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if str(machine.cache) in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    answer = served.ask(problem(64))
    assert answer["reason"] is None
    assert problems_of(Path(answer["bundle"])) == [problem(64)]
    [warning] = answer["warnings"]
    assert "serve this process only" in warning
    assert "No space left on device" in warning
    assert served.ask(problem(128))["warnings"] == []
    assert bundle.read_bytes() == good
    assert not machine.partial_files()


def test_the_temporary_directory_is_removed_before_entries_are_sent(
    machine: JitMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client kills a server that takes long to end, and sending can take long."""
    (machine.cache.parent / "shared").mkdir()
    machine.set(
        NVGEMM_AOT_REMOTE_CACHE=f"file://{machine.cache.parent}/shared",
        NVGEMM_AOT_REMOTE_CACHE_TRUST="1",
    )
    read_only(machine)
    served = Served(machine.cache.parent / "file" / "cache")
    directory = Path(served.ask(problem(16))["bundle"]).parent.parent
    assert directory.exists()
    seen: list[bool] = []
    flush = RemoteCache.flush

    def look_and_flush(remote: RemoteCache) -> None:
        seen.append(directory.exists())
        flush(remote)

    monkeypatch.setattr(RemoteCache, "flush", look_and_flush)
    served.close()
    assert seen[-1] is False


def test_a_cache_that_is_cleared_meanwhile_is_filled_again(
    machine: JitMachine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = build_compiler._results

    def compile_and_lose(*arguments: Any) -> Any:
        yield from results(*arguments)
        monkeypatch.setattr(build_compiler, "_results", results)
        shutil.rmtree(machine.cache / "entries")

    monkeypatch.setattr(build_compiler, "_results", compile_and_lose)
    answer = served.ask(problem())
    assert (answer["reason"], answer["warnings"]) == (None, [])
    assert machine.compiled() == ["one", "one", "three", "three", "two", "two"]
    assert answer["bundle"] == str(machine.bundles()[0])


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_goes_wrong_is_a_reason(
    machine: JitMachine, served: Served, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("a mistake")

    if is_ours:
        monkeypatch.setattr(JitCompiler, "compile", broken)
    machine.set(FAKE_OPERATORS="nospace")
    answer = served.ask(problem())
    assert answer["bundle"] is None
    said = "LookupError: a mistake" if is_ours else "No space left on device"
    assert said in answer["reason"]


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("0", 7), ("many", 7), ("", 7)])
def test_compiler_processes_are_as_many_as_the_user_says_or_the_machine_carries(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: int
) -> None:
    monkeypatch.setattr(server, "default_jobs", lambda: 7)
    monkeypatch.setenv("NVGEMM_AOT_JIT_JOBS", value)
    assert server._jobs() == expected


def test_the_runtime_finds_what_was_compiled_behind_what_was_shipped(
    machine: JitMachine, compiler: JitCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    installation = Installation()
    assert not installation.bundles()
    bundle = compiler.compile(problem(), 4, DEVICE).bundle
    assert not isinstance(installation.index(H200).match(problem(), 16), Match)
    installation.refresh_user_bundles()
    index = installation.index(H200)
    declared = index.match(problem(), 16)
    near = index.match(problem(64), 16)
    assert isinstance(declared, Match)
    assert isinstance(near, Match)
    assert (declared.basis, declared.from_jit) == (Basis.DECLARED, True)
    assert (near.basis, near.from_jit) == (Basis.SIGNATURE, True)
    view = declared.kernels[0].bundle
    assert view.opened is not None
    assert view.opened.path == bundle
    assert view.origin == f"the JIT cache {machine.cache / 'jit'}"


def test_by_default_all_providers_that_are_installed_are_asked(
    machine: JitMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set(NVGEMM_AOT_JIT_PROVIDER="")
    assert server._provider().name == "cutlass_operators+quack+gathered"
    assert not caplog.records

    def toolchain(self: Quack) -> dict[str, str]:
        raise ToolchainError("cannot compile quack's kernels: quack-kernels 9 is installed")

    monkeypatch.setattr(Quack, "toolchain", toolchain)
    assert server._provider().name == "cutlass_operators+gathered"
    (said,) = warnings_of(caplog)
    assert said == (
        "run-time compiling skips provider quack: cannot compile quack's kernels: "
        "quack-kernels 9 is installed; to silence this, set "
        "NVGEMM_AOT_JIT_PROVIDER=cutlass_operators+gathered"
    )
    machine.set(NVGEMM_AOT_JIT_PROVIDER="quack")
    assert server._provider().name == "quack", "what is named is asked, and then refuses"
    machine.set(NVGEMM_AOT_JIT_PROVIDER="")
    for provider in (CutlassOperators, Gathered):
        monkeypatch.setattr(provider, "toolchain", toolchain)
    with pytest.raises(ToolchainError, match="quack-kernels 9 is installed"):
        server._provider()


def test_a_problem_is_ranked_by_what_is_shipped(
    machine: JitMachine, compiler: JitCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"recipe of fake_provider:FakeProvider": FakeProvider.recipe}
    times = {"three": 1000, "one": 1300, "two": 1500}
    measured = entry(
        times,
        problem=problem(),
        provider=FakeProvider.name,
        toolchain={**FakeProvider().toolchain(), **recipe},
    )
    monkeypatch.setattr(
        "nvgemm_aot.jit.jit_compiler.shipped_rankings",
        lambda problems: rankings(*[measured] * (problem() in problems)),
    )
    outcome = compiler.compile(problem(), 2, DEVICE)
    compiler.compile(other := problem(m=32), 2, DEVICE)
    assert outcome.bundle is not None
    with Bundle(outcome.bundle) as opened:
        header = opened.header
        ranked = {one.problem: one for one in header.rankings}
    found = ranked[problem()]
    names = [header.kernels[place.kernel].operator for place in found.kernels]
    assert names == ["three", "one"]
    assert found.measured is not None
    assert found.measured.standing == "measured once"
    assert ranked[other].measured is None
