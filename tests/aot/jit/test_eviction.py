"""What is evicted from a cache directory, by itself and by ``nvgemm-aot cache``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_user_bundle import content, problem, summary

from nvgemm_aot.cli import cache as cache_commands
from nvgemm_aot.cli.main import main
from nvgemm_aot.cli.terminal.printing import size_text
from nvgemm_aot.jit import eviction
from nvgemm_aot.jit.eviction import Eviction, enforce, limit_bytes, read_usage, select_over_limit
from nvgemm_aot.jit.user_bundle import UserBundle, read_user_bundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.installed import jit_cache
from nvgemm_runtime.installed.jit_cache import mark_used, stamp_path

DAY = 86400
NOW = 1_700_000_000.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Three problems of one bundle, used 3, 2 and 1 days ago, and four entries, 4 to 1 days."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(directory))
    cache = Cache(directory)
    bundle = user_bundle(cache)
    bundle.append(content({1: [0, 1], 2: [1, 2], 3: [3]}))
    for m in (1, 2, 3):
        stamp = stamp_path(directory, problem(m))
        stamp.parent.mkdir(exist_ok=True)
        stamp.touch()
        used(stamp, 4 - m)
    for count in range(4):
        cache.put(f"{count}" * 64, b"x" * 968)
        used(cache.path(f"{count}" * 64), 4 - count)
    return cache


def user_bundle(cache: Cache) -> UserBundle:
    return UserBundle(cache, build_target("sm_90a"), {"dsl": "1"}, "test", print)


def used(path: Path, days_ago: float) -> None:
    os.utime(path, (NOW - days_ago * DAY,) * 2)


def held(cache: Cache) -> list[int]:
    bundle = user_bundle(cache).path
    return sorted(summary(read_user_bundle(bundle))) if bundle.exists() else []


def entries(cache: Cache) -> str:
    return "".join(sorted(path.name[0] for path in cache.directory.glob("entries/*/*")))


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_within_the_limit_nothing_goes(cache: Cache) -> None:
    usage = read_usage(cache)
    assert usage.size_bytes == 4000 + user_bundle(cache).path.stat().st_size
    assert select_over_limit(usage, usage.size_bytes, NOW) == Eviction(files=(), problems={})


def test_what_was_not_used_for_longest_goes_first(cache: Cache) -> None:
    usage = read_usage(cache)
    chosen = select_over_limit(usage, usage.size_bytes - 1, NOW)
    # A byte too many and a tenth of the limit: the oldest entry, and what is used as long ago as
    # the next one.
    assert next(path.name[0] for path in chosen.files) == "0"
    assert frozenset({problem(3)}) not in chosen.problems.values()
    everything = select_over_limit(usage, 0, NOW)
    assert len(everything.files) == 4
    assert everything.problems == {user_bundle(cache).path: frozenset(map(problem, (1, 2, 3)))}


def test_what_is_in_use_stays_whatever_the_limit(cache: Cache) -> None:
    used(stamp_path(cache.directory, problem(2)), 0)
    used(cache.path("1" * 64), 0.01)
    chosen = select_over_limit(read_usage(cache), 0, NOW)
    assert chosen.problems == {user_bundle(cache).path: frozenset(map(problem, (1, 3)))}
    assert sorted(path.name[0] for path in chosen.files) == ["0", "2", "3"]


def test_what_a_build_may_read_again_is_not_evicted(cache: Cache) -> None:
    used(cache.path("0" * 64), 0.2)  # longest ago of those that were used today
    used(cache.path("1" * 64), 0.1)
    chosen = select_over_limit(read_usage(cache), 0, NOW)
    assert sorted(path.name[0] for path in chosen.files) == ["2", "3"]


def test_enforcing_drops_problems_with_their_stamps_and_kernels(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(stamp_path(cache.directory, problem(2)), -1e6)
    monkeypatch.setenv("NVGEMM_AOT_CACHE_LIMIT", "1")
    enforce(cache)
    assert held(cache) == [2]
    assert entries(cache) == ""
    stamp = stamp_path(cache.directory, problem(2)).name
    assert [path.name for path in cache.directory.glob("jit/used/*")] == [stamp]


def test_a_bundle_goes_with_its_last_problem(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_CACHE_LIMIT", "0")
    enforce(cache)
    assert not user_bundle(cache).path.exists()
    assert read_usage(cache).size_bytes == 0


def test_enforcing_where_nothing_can_be_written_does_nothing(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("read-only")

    monkeypatch.setenv("NVGEMM_AOT_CACHE_LIMIT", "0")
    monkeypatch.setattr(eviction, "acquire", refuse)
    enforce(cache)
    assert held(cache) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("12", 12), ("3K", 3 << 10), ("512M", 512 << 20), ("2g", 2 << 30), (" 1T ", 1 << 40)],
        *((no_size, 1 << 30) for no_size in ("lots", "-1", "1.5G", "")),
    ],
)
def test_the_limit_is_a_size(monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    monkeypatch.setenv("NVGEMM_AOT_CACHE_LIMIT", text)
    assert limit_bytes() == expected


def test_use_is_marked_once_a_process_and_never_where_nothing_is_kept(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_cache, "_marked", set())
    stamp = stamp_path(cache.directory, problem(1))
    mark_used(problem(1))
    assert stamp.stat().st_mtime > time.time() - DAY
    used(stamp, 3)
    mark_used(problem(1))
    assert stamp.stat().st_mtime < NOW
    mark_used(problem(9))
    assert not stamp_path(cache.directory, problem(9)).exists()


def test_reading_an_entry_is_using_it(cache: Cache) -> None:
    assert cache.get("0" * 64) is not None
    assert cache.path("0" * 64).stat().st_mtime > time.time() - DAY


def test_path_prints_the_directory(cache: Cache, tmp_path: Path) -> None:
    assert run("path").output == f"{cache.directory}\n"
    assert run("path", "--cache-dir", str(tmp_path)).output == f"{tmp_path}\n"


def test_list_shows_what_is_kept(cache: Cache) -> None:
    (cache.directory / "jit" / "broken.nvgemm").write_bytes(b"broken")
    (cache.directory / "jit" / "x.nvgemm.damaged-1").write_bytes(b"broken too")
    document = json.loads(run("list", "--json").output)
    assert document["limit_bytes"] == 1 << 30
    assert (document["entries"], document["entries_bytes"]) == (4, 4000)
    broken, bundle = document["bundles"]
    assert "[truncated]" in broken["error"]
    assert bundle["error"] is None
    assert bundle["target"].startswith("sm_")
    assert bundle["kernels"] == 4
    assert [(p["problem"], p["kernels"]) for p in bundle["problems"]] == [
        (problem(1).key, 2),
        (problem(2).key, 2),
        (problem(3).key, 1),
    ]
    assert bundle["problems"][2]["last_used"] == "2023-11-13T22:13:20+00:00"
    assert document["damaged"][0]["bytes"] == 10
    assert document["size_bytes"] == 4000 + bundle["bytes"] + 16
    text = run("list").output
    for expected in (problem(2).key, "2023-11-12T22:13:20", "4 kernels for 3 problems", "damaged"):
        assert expected in text
    assert "4 compiled kernels and plans with 4000 B" in text


def test_clear_removes_everything(cache: Cache) -> None:
    size_bytes = read_usage(cache).size_bytes
    (cache.directory / "jit" / "broken.nvgemm").write_bytes(b"")
    cache.lock_directory.mkdir(exist_ok=True)
    cache.lock_path("kernel-of-a-killed-process").touch()
    said = run("clear").output
    freed = f"{size_text(size_bytes)} freed, 3 problems and 4 compiled kernels and plans removed"
    assert freed in said
    assert "0 B left" in said
    assert "0 B, including 0 compiled kernels" in run("list").output
    left = [path.name for path in cache.directory.rglob("*") if path.is_file()]
    assert left == ["generation"], "what says that something was removed"


def test_clear_of_one_problem_keeps_the_rest(cache: Cache) -> None:
    result = run("clear", "--problem", problem(2).key, "--problem", problem(7).key)
    assert held(cache) == [1, 3]
    assert entries(cache) == "0123"
    assert "1 problem and 0 compiled kernels" in result.output
    assert f"no user bundle has {problem(7).key}" in result.stderr


def test_clear_by_age(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_commands, "_now", lambda: NOW)
    run("clear", "--older-than", "60h", "--problem", problem(2).key)
    assert held(cache) == [1, 2, 3]
    run("clear", "--older-than", "60h")
    assert held(cache) == [2, 3]
    assert entries(cache) == "23"


@pytest.mark.parametrize(
    "arguments",
    [*(["--older-than", age] for age in ("soon", "3", f"{10**12}d")), ["--problem", "mm"]],
)
def test_clear_refuses_what_it_does_not_understand(cache: Cache, arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["cache", "clear", *arguments])
    assert result.exit_code == 2
    assert held(cache) == [1, 2, 3]


def test_a_cache_directory_that_is_a_file_is_no_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "file"))
    for command in ("list", "clear"):
        result = CliRunner().invoke(main, ["cache", command])
        assert result.exit_code == StorageError.exit_code
        assert "is not a directory" in result.output
