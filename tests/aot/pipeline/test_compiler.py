"""The compile stage, with real worker processes and the fake provider's small C kernels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from compile_tasks import tasks
from counted_starts import bound_starts
from fake_provider import FakeProvider
from nvgemm_aot.pipeline import compiler, compiler_limits, linker
from nvgemm_aot.pipeline.compiler import (
    Compilation,
    ProviderWorkers,
    Task,
    TaskResult,
    compile_all,
)
from nvgemm_aot.pipeline.compiler_limits import compile_limit_seconds, default_jobs
from nvgemm_aot.pipeline.workers import WorkerDied
from nvgemm_aot.providers import BLAME
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.errors import StorageError, ToolchainError
from nvgemm_runtime.gemm.target import Target
from synthetic_cubin import synthetic_cubin


def test_compiles_each_kernel_once_and_never_again(tmp_path: Path, log: Path) -> None:
    cache = Cache(tmp_path / "cache")
    wanted = tasks("one", "two", "three")
    seen: list[tuple[int, int]] = []
    first = compile_all(
        [*wanted, wanted[0]],
        cache,
        jobs=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (first.compiled, first.failures) == (3, ())
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert list(first.kernels) == [task.key for task in wanted]
    assert all(one.payload.startswith(b"\x7fELF") for one in first.kernels.values())
    assert {one.sha256 for one in first.kernels.values()} == {
        sha256_hex(one.payload) for one in first.kernels.values()
    }
    again = compile_all(wanted, cache, jobs=2)
    assert again == Compilation(kernels=first.kernels, compiled=0, failures=())
    assert sorted(log.read_text().split()) == ["one", "three", "two"]


def test_a_failing_kernel_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    wanted = tasks("one", "fails", "two")
    result = compile_all(wanted, cache, jobs=1)
    assert result.compiled == 2
    assert [(f.task.candidate.operator, f.reason) for f in result.failures] == [
        ("fails", "fails: told to fail")
    ]
    assert not result.failures[0].is_transient
    assert [cache.has(task.key) for task in wanted] == [True, False, True]


def test_a_dying_compiler_is_named_and_the_others_go_on(tmp_path: Path, log: Path) -> None:
    cache = Cache(tmp_path / "cache")
    wanted = tasks("one", "crash", "two", "three")
    result = compile_all(wanted, cache, jobs=2)
    assert result.compiled == 3
    assert [f.task.candidate.operator for f in result.failures] == ["crash"]
    assert result.failures[0].reason == (
        "the compiler process died by SIGKILL, as when memory is short; if it does so again, "
        f"{BLAME}"
    )
    assert result.failures[0].is_transient
    assert all(cache.has(task.key) for task in wanted if task.candidate.operator != "crash")
    assert Counter(log.read_text().split())["crash"] == 2


def test_the_users_limit_is_that_of_compiler_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_COMPILE_TIMEOUT", "1")
    [slow] = tasks("slow")
    result = compile_all([slow], Cache(tmp_path), jobs=1)
    [failure] = result.failures
    assert failure.is_transient
    assert failure.reason == (
        "its compiler was killed: not done within 1 s; set NVGEMM_AOT_COMPILE_TIMEOUT to allow "
        f"more, or {BLAME}"
    )


def test_an_object_that_does_not_link_is_the_providers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [task] = tasks("one")

    class Garbage:
        def compile(self, *_: object) -> bytes:
            return b"no object"

    monkeypatch.setattr(compiler, "_worker_provider", lambda name: Garbage())
    reason = compiler._compile_and_store(task, Cache(tmp_path))
    assert reason is not None
    assert reason.startswith("its object does not link: the linker (")
    assert reason.endswith(BLAME)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, 300),
        ("", 300),
        ("2.5", 2.5),
        ("inf", math.inf),
        ("0", 300),
        ("-1", 300),
        ("soon", 300),
    ],
)
def test_the_limit_is_a_number_of_seconds(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str | None,
    seconds: float,
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_COMPILE_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("NVGEMM_AOT_COMPILE_TIMEOUT", text)
    assert compile_limit_seconds() == seconds
    wrong = text in ("0", "-1", "soon")
    assert (
        caplog.messages
        == [f"NVGEMM_AOT_COMPILE_TIMEOUT={text}: must be a number of seconds above 0; taken as 300"]
        * wrong
    )


def test_compilers_that_cannot_start_are_an_error_with_their_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProvider, "name", "dying_provider:DyingProvider")
    (tmp_path / "dying_provider.py").write_text(
        "import os\nos.write(2, b'no such library')\nos._exit(127)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bound_starts(monkeypatch, 3)
    said = r"those of provider 'dying_provider:.*' for cu13: 3 in a row .*exit status 127: no such"
    with pytest.raises(ToolchainError, match=said):
        compile_all(tasks("one", "two"), Cache(tmp_path / "cache"), jobs=1)


def test_a_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    wanted = tasks("one")
    compile_all(wanted, cache, jobs=1)
    good = cache.get(wanted[0].key)
    path = cache.path(wanted[0].key)
    path.write_bytes(path.read_bytes()[:-1])
    assert compile_all(wanted, cache, jobs=1).compiled == 1
    assert cache.get(wanted[0].key) == good


def test_what_a_killed_compiler_had_begun_is_swept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    [wanted] = tasks("one")
    path = cache.path(wanted.key)
    path.parent.mkdir(parents=True)
    left = path.with_name(f".{path.name}.0123456789ab.partial")
    left.touch()
    compile_all([wanted], cache, jobs=1)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_unwritable_cache_fails_before_anything_is_compiled(tmp_path: Path, log: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file in the way")
    with pytest.raises(StorageError, match="NVGEMM_AOT_CACHE"):
        compile_all(tasks("one"), Cache(tmp_path / "cache"), jobs=1)
    assert log.read_text() == ""


def test_keys_change_with_what_shapes_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**options: object) -> str:
        return tasks("one", **options)[0].key  # type: ignore[arg-type]

    base = key()
    assert key() == base
    assert tasks("two")[0].key != base
    assert key(cluster_sizes=(2,)) != base
    for module, name, value in (
        (FakeProvider, "recipe", "2"),
        (linker, "FLAGS", (*linker.FLAGS, "-O2")),
        (linker, "linker_version", lambda _: "another linker"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert key() != base
    monkeypatch.setenv("FAKE_VERSION", "2")
    assert key() != base
    monkeypatch.setenv("FAKE_VERSION", "1")
    monkeypatch.setattr(linker, "c_compiler", lambda: ("gcc", "-Wl,-z,nodelete"))
    assert key() != base


def test_keys_depend_on_the_device_only_through_compiled_in_numbers() -> None:
    def keys(sizes: tuple[int, ...]) -> tuple[str, str]:
        b200 = tasks("one", cluster_sizes=sizes, device="B200")[0].key
        return b200, tasks("one", cluster_sizes=sizes, device="GB200")[0].key

    assert keys(())[0] == keys(())[1]
    assert keys((2,))[0] != keys((2,))[1]  # 74 and 76 clusters
    assert keys((8,))[0] == keys((8,))[1]  # 15 and 15


def test_container_limits_count_but_page_cache_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gigabyte = 10**9
    for name, text in (
        ("memory.max", str(8 * gigabyte)),
        ("memory.current", str(7 * gigabyte)),
        ("memory.stat", f"anon 1\ninactive_file {6 * gigabyte}\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        compiler_limits, "_CGROUPS", ((tmp_path / "memory.max", tmp_path / "memory.current"),)
    )
    monkeypatch.setattr(compiler_limits, "_meminfo_available_bytes", lambda: 100 * gigabyte)
    assert compiler_limits._free_memory_bytes() == 7 * gigabyte
    (tmp_path / "memory.max").write_text("max")
    assert compiler_limits._free_memory_bytes() == 100 * gigabyte


def test_default_jobs_respects_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for free, jobs in ((100e9, 16), (4.6e9, 3), (1e9, 1), (0, 1)):
        monkeypatch.setattr(compiler_limits, "_free_memory_bytes", lambda free=free: int(free))
        assert default_jobs() == jobs


class _DiesOfGroups:
    """Compiler processes that die of every group of several tasks."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def run(
        self, groups: Sequence[tuple[Task, ...]]
    ) -> Iterator[tuple[tuple[Task, ...], tuple[TaskResult, ...] | WorkerDied]]:
        for group in groups:
            self.groups.append(len(group))
            dies = len(group) > 1 or group[0].candidate.operator == "two"
            yield group, WorkerDied("of signal 9") if dies else (TaskResult(),)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_kernel_whose_twin_for_another_platform_kills_the_compiler_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are compiled by one process; when it dies, each is tried by itself."""
    workers = _DiesOfGroups()
    monkeypatch.setattr(compiler, "start_workers", lambda *_: workers)
    usual = tasks("one", "two")
    arm = Target(arch=usual[0].target.target.arch, platform="linux_aarch64")
    wanted = [*usual, replace(usual[0], target=replace(usual[0].target, target=arm))]
    with ProviderWorkers(Cache(tmp_path), 1, usual[0].process_kind) as every:
        found = list(every.run(wanted))
    assert workers.groups == [2, 1, 1, 1]
    results = {(t.candidate.operator, t.target.target.platform): one for t, one in found}
    assert len(results) == len(found) == 3
    died = [key for key, one in results.items() if isinstance(one, WorkerDied)]
    assert died == [("two", "linux_x86_64")]


def test_device_code_of_another_cuda_version_is_a_failure_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a provider, say, that imports the compiler before it is chosen."""
    (task,) = tasks("one")
    payload = b"host code" + synthetic_cubin(cuda_version=129)
    monkeypatch.setattr(linker, "link", lambda *_: payload)
    cache = Cache(tmp_path)
    reason = compiler._compile_and_store(task, cache)
    assert reason is not None
    assert "compiled with CUDA 12.9" in reason
    assert "needs cu13" in reason
    assert "cute_dsl.set_environment()" in reason
    assert not cache.has(task.key)
