"""Kernels that others than this user could have written are not used, by builds nor at run time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_provider import FakeProvider
from jit_programs import JitMachine, problem
from jit_requests import DEVICE, manifest_of
from nvgemm_aot.jit.eviction import evict, read_usage, select_requested
from nvgemm_aot.jit.jit_compiler import JitCompiler
from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.storage import build_cache
from nvgemm_aot.storage.build_cache import Cache, cache_key, private_cache
from nvgemm_aot.storage.files import write_atomic
from nvgemm_aot.storage.locks import locked
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import StorageError

KEY = cache_key("kind", 1)
PLANTED = b"\x7fELF planted"
STRANGER = 12345


def open_to_the_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


ways = pytest.mark.parametrize(
    "expose",
    [
        open_to_the_group,
        pytest.param(
            give_away,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
"""How a file or directory becomes one that others could have written."""


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has warned of nothing yet."""
    monkeypatch.setattr(build_cache, "_warned", False)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("nvgemm")
    ]


@ways
@pytest.mark.parametrize("place", ["directory", "entries", "folder", "file"])
def test_an_entry_that_others_could_have_written_counts_as_absent(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    expose: Callable[[Path], None],
    place: str,
) -> None:
    cache = Cache(tmp_path / "cache")
    cache.put(KEY, PLANTED)
    assert cache.get(KEY) == PLANTED
    file = cache.path(KEY)
    exposed = {
        "directory": cache.directory,
        "entries": file.parent.parent,
        "folder": file.parent,
        "file": file,
    }[place]
    expose(exposed)
    assert cache.get(KEY) is None
    assert not cache.has(KEY)
    assert cache.get(KEY) is None
    [warning] = warnings_in(caplog)
    assert str(exposed) in warning
    assert f"chmod -R go-w {cache.directory}" in warning


def test_an_entry_behind_a_link_that_others_could_move_counts_as_absent(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.put(KEY, PLANTED)
    shared = tmp_path / "shared"
    cache.directory.rename(shared)
    cache.directory.symlink_to(shared)
    assert cache.get(KEY) == PLANTED
    shared.chmod(0o777)
    assert cache.get(KEY) is None


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_what_is_made_can_be_written_by_its_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        cache = Cache(tmp_path / "a" / "cache")
        cache.put(KEY, PLANTED)
        with locked(cache.lock_path("lock")):
            pass
        compiler = JitCompiler(cache, FakeProvider(), 1, print)
        made = compiler.compile(problem(), 2, DEVICE)
        compiler.close()
        built = build(
            manifest_of(problem(), 2), tmp_path / "b" / "out", cache, provider=FakeProvider()
        )
    finally:
        os.umask(before)
    assert made.bundle is not None
    assert built.compiled == 0
    paths = [*(tmp_path / "a").rglob("*"), *(tmp_path / "b").rglob("*"), tmp_path / "a"]
    modes = {path: path.stat().st_mode & 0o777 for path in paths}
    assert {modes[path] for path in paths if path.is_dir()} == {0o755}
    assert {modes[path] for path in paths if path.is_file()} == {0o644}
    assert any(path.parent.name == "used" for path in paths)


def test_a_stricter_umask_is_kept(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "a" / "b", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o600


def some_manifest() -> Manifest:
    return Manifest(
        name="some",
        description="",
        targets=(build_target("sm_90a"),),
        declared=(Declared(problem=problem(), candidates=2),),
    )


def planted_kernels(cache: Cache, out: Path) -> list[bytes]:
    """Compile what `some_manifest` needs, and put other code, rightly digested, in its place."""
    built = build(some_manifest(), out, cache, provider=FakeProvider())
    with Bundle(built.bundles[0].path) as bundle:
        payloads = [bundle.payload(kernel) for kernel in bundle.header.kernels]
    for path in (cache.directory / "entries").glob("*/*"):
        content = path.read_bytes()[32:]
        if content.startswith(b"\x7fELF"):
            cache.put(path.name, content + b"planted")
    return payloads


@pytest.mark.slow
@pytest.mark.parametrize("place", ["entries", "folders"])
def test_a_build_compiles_anew_where_others_could_have_planted_kernels(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    cache = Cache(tmp_path / "cache")
    honest = planted_kernels(cache, tmp_path / "before")
    entries = cache.directory / "entries"
    for exposed in [entries] if place == "entries" else list(entries.iterdir()):
        open_to_the_group(exposed)
    before = {path: path.read_bytes() for path in entries.rglob("*") if path.is_file()}
    built = build(some_manifest(), tmp_path / "out", cache, provider=FakeProvider())
    assert built.compiled == 2
    with Bundle(built.bundles[0].path) as bundle:
        assert [bundle.payload(kernel) for kernel in bundle.header.kernels] == honest
    [warning] = warnings_in(caplog)
    assert "the build cache is not used" in warning
    assert f"chmod -R go-w {cache.directory}" in warning
    assert before == {path: path.read_bytes() for path in entries.rglob("*") if path.is_file()}
    assert not list(Path(tempfile.gettempdir()).glob("nvgemm-aot-jit-*/entries"))


@ways
def test_run_time_compiling_takes_no_planted_kernel(
    machine: JitMachine, expose: Callable[[Path], None]
) -> None:
    cache = Cache(machine.cache)
    compiler = JitCompiler(cache, FakeProvider(), 1, print)
    compiler.compile(problem(), 2, DEVICE)
    for folder in (machine.cache / "entries").iterdir():
        expose(folder)
    for bundle in machine.bundles():
        bundle.unlink()
    with pytest.raises(StorageError, match=r"entries/\w\w .*chmod -R go-w"):
        compiler.compile(problem(), 2, DEVICE)
    compiler.close()
    assert not machine.bundles()
    answer = machine.run(problem())
    assert answer["compiled"] == [3], "compiled again, and kept in memory"
    assert not answer["bundles"][0].startswith(str(machine.cache))
    assert answer["said"].count("serve this process only") == 1
    assert answer["said"].count("could not be trusted") == 1


@ways
def test_a_user_bundle_of_others_is_moved_aside_and_none_of_it_is_kept(
    machine: JitMachine, expose: Callable[[Path], None]
) -> None:
    notes: list[str] = []
    compiler = JitCompiler(Cache(machine.cache), FakeProvider(), 1, notes.append)
    bundle = compiler.compile(problem(16), 2, DEVICE).bundle
    assert bundle is not None
    expose(bundle)
    assert compiler.compile(problem(64), 2, DEVICE).bundle == bundle
    compiler.close()
    with Bundle(bundle) as opened:
        assert [ranking.problem for ranking in opened.header.rankings] == [problem(64)]
    assert bundle.stat().st_uid == os.geteuid()
    assert not bundle.stat().st_mode & 0o022
    [note] = notes
    assert "cannot be trusted" in note
    assert "moved to" in note


@ways
def test_clearing_the_cache_writes_no_kernel_of_others_again(
    machine: JitMachine, expose: Callable[[Path], None]
) -> None:
    cache = Cache(machine.cache)
    compiler = JitCompiler(cache, FakeProvider(), 1, print)
    bundle = compiler.compile(problem(16), 2, DEVICE).bundle
    compiler.compile(problem(64), 2, DEVICE)
    compiler.close()
    assert bundle is not None
    seen = select_requested(read_usage(cache), problems=[problem(16)])
    assert bundle in seen.problems
    expose(bundle)
    before = bundle.stat()
    evict(cache, seen)
    assert bundle.stat().st_ino == before.st_ino
    [kept] = read_usage(cache).bundles
    assert "cannot be trusted" in str(kept.error)
    evict(cache, select_requested(read_usage(cache)))
    assert not bundle.exists()


def test_no_private_place_at_all_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    with (
        pytest.raises(StorageError, match="set NVGEMM_AOT_CACHE or TMPDIR"),
        private_cache(Cache(shared / "cache")),
    ):
        raise AssertionError("there is no such cache")
    assert not list(shared.iterdir())


@ways
def test_a_bundle_that_others_could_have_put_there_is_not_up_to_date(
    tmp_path: Path, expose: Callable[[Path], None]
) -> None:
    cache = Cache(tmp_path / "cache")

    def built() -> bool:
        made = build(some_manifest(), tmp_path / "out", cache, provider=FakeProvider())
        return made.bundles[0].up_to_date

    assert [built(), built()] == [False, True]
    [bundle] = (tmp_path / "out").iterdir()
    expose(bundle)
    assert [built(), built()] == [False, True]
    assert bundle.stat().st_uid == os.geteuid()


TEMPORARY = """
import os, sys, tempfile
from pathlib import Path
from nvgemm_aot.pipeline.compiler import ProcessKind, _prepare_worker
_prepare_worker(ProcessKind(provider="fake_provider:FakeProvider", cuda="cu13"), Path(sys.argv[1]))
print(tempfile.gettempdir(), os.environ["TMPDIR"], sep="\\n")
"""


@pytest.mark.parametrize(("mode", "is_private"), [(0o700, True), (0o1777, True), (0o770, False)])
def test_compilers_keep_their_files_where_others_cannot_change_them(
    tmp_path: Path, mode: int, is_private: bool
) -> None:
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    temporary.chmod(mode)
    done = subprocess.run(
        [sys.executable, "-c", TEMPORARY, cache],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, variable = map(Path, done.stdout.split())
    assert found == variable
    assert is_private is (found == temporary)
    assert is_private is (found.parent != cache / "temporary")
    if not is_private:
        assert not found.parent.stat().st_mode & 0o022
        assert found.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_compiler_left_in_the_cache_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    temporary.chmod(0o770)
    monkeypatch.setenv("TMPDIR", str(temporary))
    program = f"{TEMPORARY}Path(tempfile.gettempdir(), 'kernel.o').touch(); os.kill(os.getpid(), 9)"
    for _ in range(2):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", program, cache], env=environment, check=False)
        [left] = (cache / "temporary").iterdir()
        assert (left / "kernel.o").exists()
        os.utime(left, (0, 0))


def test_compilers_write_nothing_where_others_could_change_it(tmp_path: Path) -> None:
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    for directory in (temporary, cache / "temporary"):
        directory.mkdir(parents=True)
        directory.chmod(0o770)
    done = subprocess.run(
        [sys.executable, "-c", TEMPORARY, cache],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "StorageError: others could change what compilers write" in done.stderr
    assert f"chmod go-w {cache / 'temporary'}" in done.stderr
    assert not list((cache / "temporary").iterdir())
