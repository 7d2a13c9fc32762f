"""The whole build over the fake provider: planning, resuming, determinism, failures."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from fake_provider import FakeProvider, candidate
from nvgemm_aot.cli.build.documents import build_document, build_text
from nvgemm_aot.cli.bundle_texts import bundle_document, bundle_text
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline import assemble, compiler, target_plan
from nvgemm_aot.pipeline.compiler import (
    Compilation,
    KernelWorkers,
    Task,
    TaskResult,
    compile_all,
    make_tasks,
)
from nvgemm_aot.pipeline.pipeline import (
    BuildResult,
    build,
    look_up_plans,
    plan_build,
    provider_of,
)
from nvgemm_aot.pipeline.target_plan import likely_provider
from nvgemm_aot.pipeline.unserved import Unserved, require_served
from nvgemm_aot.providers import Enumeration
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget, build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.ranking_entries import Scope, UnservedReason
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import CompileError, NoCandidateError, StorageError, ToolchainError
from nvgemm_runtime.gemm.problem import DType, Signature
from nvgemm_runtime.gemm.target import Target

TEXT = """
version: 1
name: some
targets: [{targets}]
candidates: 8
gemms:
{gemms}
"""
GEMM = "  - {{dtype: {dtype}, mnk: [[{m}, 512, {k}]]}}"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def manifest(
    directory: Path,
    *,
    ms: tuple[int, ...] = (1, 16),
    ks: tuple[int, ...] = (256,),
    dtype: str = "bf16",
    targets: str = "sm_100f",
) -> Manifest:
    directory.mkdir(exist_ok=True)
    path = directory / "some.yaml"
    gemms = "\n".join(GEMM.format(m=m, k=k, dtype=dtype) for m in ms for k in ks)
    path.write_text(TEXT.format(targets=targets, gemms=gemms))
    return load_manifest(path)


def run(directory: Path, cache: Cache, out: str = "out", **options: object) -> BuildResult:
    ms = options.pop("ms", (1, 16))
    targets = options.pop("targets", "sm_100f")
    return build(
        manifest(directory, ms=ms, targets=targets),  # type: ignore[arg-type]
        directory / out,
        cache,
        jobs=2,
        provider=FakeProvider(),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.usefixtures("compiled_here")
def test_builds_one_bundle_a_target(tmp_path: Path, cache: Cache) -> None:
    result = run(tmp_path, cache, targets="sm_100f, {arch: sm_90a, device: H200}")
    assert [bundle.path.name for bundle in result.bundles] == [
        "some-sm_100f-linux_x86_64-cu13.nvgemm",
        "some-sm_90a-linux_x86_64-cu13.nvgemm",
    ]
    for built in result.bundles:
        with Bundle(built.path) as bundle:
            bundle.check_body()
            assert bundle.header == built.header
            assert len(bundle.header.rankings) == 2
            assert {kernel.operator for kernel in bundle.header.kernels} == {"one", "two", "three"}
            for kernel in bundle.header.kernels:
                assert sha256_hex(bundle.payload(kernel)) == kernel.id


def test_bytes_depend_on_nothing_but_the_inputs(tmp_path: Path) -> None:
    first = run(tmp_path / "a", Cache(tmp_path / "cache1"), ms=(1, 16, 64))
    second = run(tmp_path / "b", Cache(tmp_path / "cache2"), ms=(64, 1, 16))
    assert first.bundles[0].path.read_bytes() == second.bundles[0].path.read_bytes()
    other = run(tmp_path / "a", Cache(tmp_path / "cache1"))
    assert (other.compiled, other.bundles[0].up_to_date) == (0, False)
    assert other.bundles[0].header.build_key != first.bundles[0].header.build_key


def test_a_payload_is_hashed_once_when_it_is_read(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256, hashed = hashlib.sha256, Counter[str]()

    def counting(data: bytes = b"") -> Any:
        digest = sha256(data)
        hashed[digest.hexdigest()] += bytes(data[:4]) == b"\x7fELF"
        return digest

    monkeypatch.setattr(hashlib, "sha256", counting)
    (built,) = run(tmp_path, cache).bundles  # workers hash what they store in their own processes
    dictionary = built.header.dictionary
    assert dictionary is not None
    hashed[dictionary.sha256] -= 1  # it may be one of the payloads
    assert [hashed[kernel.id] for kernel in built.header.kernels] == [1, 1, 1]


@pytest.mark.usefixtures("compiled_here")
def test_second_build_leaves_the_bundle_alone(tmp_path: Path, cache: Cache) -> None:
    first = run(tmp_path, cache).bundles[0]
    stamp = first.path.stat().st_mtime_ns
    again = run(tmp_path, cache)
    assert again.compiled == 0
    assert again.bundles[0].up_to_date
    assert again.bundles[0].header == first.header
    assert first.path.stat().st_mtime_ns == stamp


@pytest.mark.usefixtures("compiled_here")
def test_how_often_gemms_were_met_changes_nothing_that_is_built(
    tmp_path: Path, cache: Cache
) -> None:
    run(tmp_path, cache)
    path = tmp_path / "some.yaml"
    path.write_text(path.read_text().replace("256]]}", "256]], count: 7}"))
    counted = load_manifest(path)
    assert {declared.count for declared in counted.declared} == {7}
    again = build(counted, tmp_path / "out", cache, provider=FakeProvider())
    assert (again.compiled, again.bundles[0].up_to_date) == (0, True)


@pytest.mark.usefixtures("compiled_here")
def test_a_damaged_bundle_is_made_again_from_the_cache(tmp_path: Path, cache: Cache) -> None:
    path = run(tmp_path, cache).bundles[0].path
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    again = run(tmp_path, cache)
    assert (again.compiled, again.bundles[0].up_to_date) == (0, False)
    assert path.read_bytes() == good


@pytest.mark.usefixtures("compiled_here")
def test_strict_makes_one_failure_fatal_and_writes_nothing(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one fails two")
    said = (
        r"1 kernel failed \(--strict\)\n"
        r"  fails of provider 'fake_provider:FakeProvider': told to fail$"
    )
    with pytest.raises(CompileError, match=said):
        run(tmp_path, cache, strict=True)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.usefixtures("compiled_here")
def test_where_nothing_compiles_nothing_is_written(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "fail1 fail2")
    with pytest.raises(CompileError, match=r"no kernel for 2 problems.*\n.*m1n512k256: none of 2"):
        run(tmp_path, cache)
    assert not list((tmp_path / "out").iterdir())


def test_compilers_that_die_are_named_with_their_provider_and_the_next_step(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "crash1 crash2")
    said = (
        r"no kernel for 2 problems; list other providers for them under `providers` in "
        r"the manifest \(default: all that come with nvgemm-aot\), or change or remove them:\n"
        r".*: none of 2 operators "
        r"compiles: crash1 and 1 more of provider 'fake_provider:FakeProvider': the compiler "
        r"process died by SIGKILL, .*; if it does so again, report it to the provider's author, or "
        r"take the provider out of the"
    )
    with pytest.raises(CompileError, match=said):
        run(tmp_path, cache)


@pytest.mark.usefixtures("compiled_here")
def test_a_problem_whose_kernels_all_fail_is_left_out_and_the_bundle_says_why(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one fails")
    monkeypatch.setattr(FakeProvider, "enumerate", _failing_for_fp16)
    result = build(
        manifest(tmp_path, dtype="[bf16, fp16]", ms=(1,)),
        tmp_path / "out",
        cache,
        jobs=1,
        provider=FakeProvider(),
    )
    (bundle,) = result.bundles
    assert [ranking.problem.signature.a for ranking in bundle.header.rankings] == [DType.BF16]
    ((problem, reason),) = bundle.header.unserved.items()
    assert problem.signature.a is DType.FP16
    assert reason == UnservedReason(
        text="its one operator does not compile: fails of provider "
        "'fake_provider:FakeProvider': told to fail",
        scope=Scope.PROBLEM,
    )
    assert result.unserved == (
        Unserved(target=Target(arch="sm_100f"), problem=problem, reason=reason.text, failed=True),
    )
    with pytest.raises(CompileError, match="no kernel for 1 problem; list other providers"):
        require_served(result.unserved, targets=1)


def _failing_for_fp16(self: FakeProvider, signature: Signature, target: BuildTarget) -> Enumeration:
    name = "fails" if signature.a is DType.FP16 else "one"
    return Enumeration(candidates=(candidate(name, signature),))


@pytest.mark.parametrize(
    ("operator", "is_complete", "said"),
    [("crash", False, "process died"), ("fails", True, "told to fail")],
)
def test_a_ranking_says_which_kernels_did_not_compile_and_whether_they_may_yet(
    tmp_path: Path,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    is_complete: bool,
    said: str,
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", f"one {operator} two")
    result = run(tmp_path, cache)
    (built,) = result.bundles
    header = built.header
    (failure,) = header.failures
    assert (failure.operator, failure.is_transient) == (operator, not is_complete)
    assert said in failure.reason
    assert [ranking.missing for ranking in header.rankings] == [(0,), (0,)]
    assert [header.is_complete(ranking) for ranking in header.rankings] == [is_complete] * 2
    document = build_document(result)
    assert document["bundles"][0]["incomplete"] == (0 if is_complete else 2)
    assert ("2 problems may get more kernels" in build_text(document)) is not is_complete
    assert {kernel.operator for kernel in header.kernels} == {"one", "two"}
    assert not run(tmp_path, cache).bundles[0].up_to_date, "a failed kernel is tried again"
    with Bundle(built.path) as bundle:
        assert bundle.header == header
        assert said in bundle_text(bundle_document(bundle))


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("operators", ["one fails two", "one fails"])
def test_a_compiler_that_gives_no_reason_makes_a_bundle_that_can_be_read(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, operators: str
) -> None:
    def silent(*arguments: Any, **named: Any) -> Compilation:
        done = compile_all(*arguments, **named)
        failures = tuple(replace(failure, reason="") for failure in done.failures)
        return replace(done, failures=failures)

    monkeypatch.setenv("FAKE_OPERATORS", operators)
    monkeypatch.setattr(assemble, "compile_all", silent)
    (built,) = run(tmp_path, cache).bundles
    with Bundle(built.path) as bundle:
        assert [failure.reason for failure in bundle.header.failures] == ["no reason given"]


@pytest.mark.usefixtures("compiled_here")
def test_a_target_without_operators_leaves_the_others_to_be_built(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProvider, "enumerate", _nothing_for_hopper)
    result = run(tmp_path, cache, targets="sm_90a, sm_100f")
    assert [bundle.header.target.arch for bundle in result.bundles] == ["sm_100f"]
    assert not result.bundles[0].header.unserved
    assert {(one.target.arch, one.reason) for one in result.unserved} == {
        ("sm_90a", "sm_90a has no such thing")
    }
    require_served(result.unserved, targets=2)  # another target serves them all
    with pytest.raises(NoCandidateError, match="sm_90a has no such thing"):
        run(tmp_path / "strict", cache, targets="sm_90a, sm_100f", strict=True)
    assert not (tmp_path / "strict" / "out").exists()


def _nothing_for_hopper(
    self: FakeProvider, signature: Signature, target: BuildTarget
) -> Enumeration:
    if target.target.arch == "sm_90a":
        return Enumeration(absence="sm_90a has no such thing")
    return Enumeration(candidates=(candidate("one", signature),))


@pytest.mark.usefixtures("compiled_here")
def test_a_bundle_whose_target_serves_nothing_any_more_is_removed(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    blackwell, hopper = run(tmp_path, cache, targets="sm_100f, sm_90a").bundles
    other = hopper.path.with_name("other-sm_90a-linux_x86_64-cu13.nvgemm")
    other.write_bytes(b"of another manifest")
    monkeypatch.setattr(FakeProvider, "enumerate", _nothing_for_hopper)
    cache = Cache(tmp_path / "another cache")
    result = run(tmp_path, cache, targets="sm_100f, sm_90a")
    assert result.removed == (hopper.path,)
    assert not hopper.path.exists()
    assert blackwell.path.exists()
    assert other.exists()
    assert run(tmp_path, cache, targets="sm_100f, sm_90a").removed == ()


@pytest.mark.usefixtures("compiled_here")
def test_a_build_that_fails_removes_nothing(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hopper,) = run(tmp_path, cache, targets="sm_90a").bundles
    monkeypatch.setattr(FakeProvider, "enumerate", _nothing_for_hopper)
    with pytest.raises(NoCandidateError, match="sm_90a has no such thing"):
        run(tmp_path, Cache(tmp_path / "another cache"), targets="sm_90a")
    assert hopper.path.exists()


@pytest.mark.usefixtures("compiled_here")
def test_some_unserved_problems_are_no_reason_to_build_again(tmp_path: Path, cache: Cache) -> None:
    def once() -> BuildResult:
        declared = manifest(tmp_path, ks=(256, 250))
        return build(declared, tmp_path / "out", cache, jobs=1, provider=FakeProvider())

    first, second = once(), once()
    assert len(first.bundles[0].header.unserved) == 2
    assert second.bundles[0].up_to_date
    assert second.unserved == first.unserved


def test_a_problem_no_operator_supports_is_found_before_compiling(
    tmp_path: Path, cache: Cache, log: Path
) -> None:
    with pytest.raises(NoCandidateError, match=r"A is contiguous along k = 250, which must be a"):
        build(
            manifest(tmp_path, ks=(250,)), tmp_path / "out", cache, jobs=1, provider=FakeProvider()
        )
    assert log.read_text() == ""


@pytest.mark.usefixtures("compiled_here")
def test_operators_with_equal_code_become_one_kernel(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "same1 same2 one")
    header = run(tmp_path, cache).bundles[0].header
    assert len(header.kernels) == 2
    assert all(len(ranking.kernels) == 2 for ranking in header.rankings)


def test_unwritable_output_is_found_before_anything_is_compiled(
    tmp_path: Path, cache: Cache, log: Path
) -> None:
    (tmp_path / "out").write_bytes(b"a file in the way")
    with pytest.raises(StorageError, match="out"):
        run(tmp_path, cache)
    assert log.read_text() == ""


def test_plan_tells_every_rejection(tmp_path: Path, cache: Cache) -> None:
    reasons: list[tuple[str, str]] = []
    planned = plan_build(
        manifest(tmp_path, ms=(1,)),
        cache,
        provider=FakeProvider(),
        on_rejection=lambda _, problem, rejection: reasons.append(
            (rejection.operator, rejection.reason)
        ),
    )
    assert reasons == [("old", "it is old")]
    assert planned[0].missing == 3


def test_planning_again_needs_no_compiler(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan_build(manifest(tmp_path), cache, provider=FakeProvider())

    def refuse(*_: object) -> None:
        raise AssertionError("asked the provider although the plan is cached")

    monkeypatch.setattr(FakeProvider, "enumerate", refuse)
    assert plan_build(manifest(tmp_path), cache, provider=FakeProvider()) == first
    monkeypatch.setenv("FAKE_VERSION", "2")
    with pytest.raises(AssertionError):
        plan_build(manifest(tmp_path), cache, provider=FakeProvider())


def test_a_kernel_that_vanishes_is_an_error_not_a_smaller_bundle(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = compiler._results

    def lose_one(workers: KernelWorkers, tasks: list[Task]) -> Iterator[tuple[Task, TaskResult]]:
        yield from results(workers, tasks)
        cache.path(tasks[0].key).unlink()

    monkeypatch.setattr(compiler, "_results", lose_one)
    with pytest.raises(StorageError, match="gone or damaged"):
        run(tmp_path, cache)
    assert not list((tmp_path / "out").iterdir())


def test_a_full_disk_while_compiling_is_a_storage_error(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one nospace two")
    with pytest.raises(StorageError, match=r"No space left on device.*temporary files"):
        run(tmp_path, cache)


@pytest.mark.usefixtures("compiled_here")
def test_each_target_reports_its_own_failures_once(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one fails")
    result = run(tmp_path, cache, targets="sm_100f, sm_100a")
    assert [len(bundle.failures) for bundle in result.bundles] == [1, 1]


def test_build_key_changes_with_the_provenance_of_device_numbers(
    tmp_path: Path, cache: Cache
) -> None:
    (item,) = plan_build(manifest(tmp_path), cache, provider=FakeProvider())
    sized = replace(item.plan.candidates[0], cluster_sizes=(2,))
    fact = item.target.device.max_active_clusters[2]
    guessed = {**item.target.device.max_active_clusters, 2: replace(fact, basis="measured")}
    device = replace(item.target.device, max_active_clusters=guessed)
    targets = (item.target, replace(item.target, device=device))
    tasks = [make_tasks([sized], target, FakeProvider()) for target in targets]
    assert tasks[0][0].key == tasks[1][0].key
    keys = {assemble.build_key(item.target, item.plan, each, {"x": "1"}) for each in tasks}
    assert len(keys) == 2


@pytest.mark.parametrize(
    "name",
    ["nvgemm_aot.pipeline.select_candidates", "fake_provider"]
    + [f"nvgemm_runtime.gemm.{name}" for name in ("support", "roles", "types")],
)
def test_other_source_of_what_shapes_a_plan_makes_another(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    declared = manifest(tmp_path).declared

    def planned() -> bool:
        lookup = target_plan.look_up_plan(declared, build_target("sm_100f"), FakeProvider(), cache)
        return lookup.stored is not None

    plan_build(manifest(tmp_path), cache, provider=FakeProvider())
    assert planned()
    read = inspect.getsource

    def read_changed(module: Any) -> str:
        return read(module) + ("# changed" if module.__name__ == name else "")

    monkeypatch.setattr(target_plan, "source_digest", target_plan.source_digest.__wrapped__)
    assert planned()
    monkeypatch.setattr(inspect, "getsource", read_changed)
    assert not planned()


def test_another_provider_never_gets_this_ones_plan(tmp_path: Path, cache: Cache) -> None:
    plan_build(manifest(tmp_path), cache, provider=FakeProvider())

    class Other(FakeProvider):
        name = "other"

        def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
            raise LookupError("asked")

    with pytest.raises(LookupError, match="asked"):
        plan_build(manifest(tmp_path), cache, provider=Other())


KILLED_BUILD = """
import sys
from pathlib import Path
from fake_provider import FakeProvider
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import build
if __name__ == "__main__":
    directory = Path(sys.argv[1])
    build(load_manifest(directory / "some.yaml"), directory / "out", Cache(directory / "cache"),
          jobs=2, provider=FakeProvider())
"""


@pytest.mark.slow
def test_killed_at_any_point_the_next_build_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", " ".join(f"k{number}" for number in range(8)))
    reference = run(tmp_path / "calm", Cache(tmp_path / "calm-cache")).bundles[0].path.read_bytes()
    manifest(tmp_path)
    script = tmp_path / "killed.py"
    script.write_text(KILLED_BUILD)
    environment = _marked_environment(tmp_path)
    bundle = tmp_path / "out" / "some-sm_100f-linux_x86_64-cu13.nvgemm"
    for attempt in range(20):
        process = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
        try:
            process.wait(timeout=0.3 + 0.4 * attempt)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if bundle.exists():
            assert bundle.read_bytes() == reference
    subprocess.run([sys.executable, script, tmp_path], env=environment, check=True)
    assert bundle.read_bytes() == reference
    _wait_until_no_process_has(f"BUILD_MARK={tmp_path}".encode())


def test_two_interrupts_stop_a_build_at_once_and_leave_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "slow1 slow2 slow3")
    manifest(tmp_path)
    script = tmp_path / "interrupted.py"
    script.write_text(KILLED_BUILD)
    environment = _marked_environment(tmp_path)
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, script, tmp_path],
        env={**environment, "FAKE_LOG": str(log)},
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A run in the background may have been told to ignore it.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not log.exists():
        time.sleep(0.05)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    process.communicate(timeout=600)  # the kernels would take an hour
    assert process.returncode != 0
    _wait_until_no_process_has(f"BUILD_MARK={tmp_path}".encode())


def _marked_environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "BUILD_MARK": str(tmp_path),
    }


def _wait_until_no_process_has(mark: bytes) -> None:
    """Workers of a killed build must not outlive it."""
    deadline = time.monotonic() + 300
    while running := [path for path in Path("/proc").glob("[0-9]*") if _has(path, mark)]:
        assert time.monotonic() < deadline, f"workers still run: {running}"
        time.sleep(0.2)


def _has(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arch", "more", "name"),
    [
        ("sm_90a", "", "cutlass_operators+quack"),
        ("sm_100f", "dtype: int8", "cutlass_operators+quack"),
        ("sm_100f, sm_90a", "epilogue: [none, add]", "cutlass_operators+quack"),
        ("sm_90a", "op: gathered_mm", "cutlass_operators+quack+gathered"),
        ("sm_90a", "epilogue: bias}]\nproviders: [quack", "quack"),
    ],
)
def test_without_names_a_manifest_gets_all_providers_that_come_along(
    tmp_path: Path, arch: str, more: str, name: str
) -> None:
    fields = ", ".join(filter(None, ["mnk: [[16, 64, 64]]", more]))
    dtype = "" if "dtype" in more else "dtype: bf16, "
    end = "]" if "providers" in more else "}]"
    path = tmp_path / "m.yaml"
    path.write_text(f"version: 1\nname: m\ntargets: [{arch}]\ngemms: [{{{dtype}{fields}{end}\n")
    assert provider_of(load_manifest(path)).name == name


def test_without_a_providers_package_a_build_says_how_to_get_it_or_do_without(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest gives the same kernels wherever it is built: none is left out silently."""

    def version(name: str) -> str:
        if name == "quack-kernels":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr("nvgemm_aot.providers.cute_dsl.cute_setup.version", version)
    said = (
        "cannot compile quack's kernels: quack-kernels is not installed; run: .*, or build without "
        r"it: set providers: \[cutlass_operators\] in the manifest"
    )
    with pytest.raises(ToolchainError, match=said):
        plan_build(manifest(tmp_path), cache)


@pytest.mark.parametrize("device", ["H100", "H200"])
def test_kernels_of_all_providers_are_ranked_together_where_a_manifest_names_none(
    tmp_path: Path, cache: Cache, device: str
) -> None:
    """Estimates of quack's narrow tiles are far ahead on Hopper, and so is what was measured."""
    (tmp_path / "m.yaml").write_text(
        f"version: 1\nname: m\ntargets: [{{arch: sm_90a, device: {device}}}]\n"
        "gemms: [{dtype: bf16, mnk: [[16, 4096, 4096], [4096, 4096, 4096]]}]\n"
    )
    (planned,) = plan_build(load_manifest(tmp_path / "m.yaml"), cache)
    candidates = planned.plan.candidates
    assert {one.provider for one in candidates} == {"cutlass_operators", "quack"}
    small = planned.plan.problems[0]
    assert small.problem.m == 16
    assert candidates[small.choices[0][0]].provider == "quack"


@pytest.mark.parametrize(
    ("arch", "more", "expected"),
    [
        ("sm_90a", "", "quack"),
        ("sm_90a", ", epilogue: bias", "quack"),
        ("sm_100f", "", "cutlass_operators"),
        ("sm_100f", ", op: gathered_mm", "gathered"),
        ("sm_90a", "}]\nproviders: [cutlass_operators]\ndefaults: {dtype: bf16", None),
    ],
)
def test_compilers_of_the_provider_that_will_likely_rank_first_are_started(
    tmp_path: Path, cache: Cache, arch: str, more: str, expected: str | None
) -> None:
    text = f"gemms: [{{dtype: bf16, mnk: [[16, 64, 64]]{more}"
    end = "}]" if expected else "}"
    (tmp_path / "m.yaml").write_text(f"version: 1\nname: m\ntargets: [{arch}]\n{text}{end}\n")
    declared = load_manifest(tmp_path / "m.yaml")
    lookup, *_ = look_up_plans(declared, cache, provider_of(declared))
    assert likely_provider(lookup) == (expected or "cutlass_operators")
