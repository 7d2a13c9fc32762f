"""The compile stage, with real worker processes and the fake provider's small C kernels."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from compile_tasks import tasks
from counted_starts import bound_starts
from fake_provider import FakeProvider
from nvgemm_aot.build import compiler, linker
from nvgemm_aot.build.compiler import (
    Compilation,
    compile_all,
    compile_limit_seconds,
    default_jobs,
)
from nvgemm_aot.storage.cache import Cache
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.errors import StorageError, ToolchainError


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
        "the compiler process died by SIGKILL, as when memory is short"
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
        "its compiler was killed: not done within 1 s; set NVGEMM_AOT_COMPILE_TIMEOUT to allow more"
    )


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
    monkeypatch.setattr(linker, "compiler", lambda: ("gcc", "-Wl,-z,nodelete"))
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
        compiler, "_CGROUPS", ((tmp_path / "memory.max", tmp_path / "memory.current"),)
    )
    monkeypatch.setattr(compiler, "_meminfo_available_bytes", lambda: 100 * gigabyte)
    assert compiler._free_memory_bytes() == 7 * gigabyte
    (tmp_path / "memory.max").write_text("max")
    assert compiler._free_memory_bytes() == 100 * gigabyte


def test_default_jobs_respects_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for free, jobs in ((100e9, 16), (4.6e9, 3), (1e9, 1), (0, 1)):
        monkeypatch.setattr(compiler, "_free_memory_bytes", lambda free=free: int(free))
        assert default_jobs() == jobs
