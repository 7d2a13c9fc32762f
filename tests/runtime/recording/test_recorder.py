"""Keeping GEMMs in a file: processes, killed ones, and files that are no recordings."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_runtime.errors import RecordError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.recording.recorder import Recorder, named_target, recorded_target
from nvgemm_runtime.recording.text import target_entry

KEY = "mm/tn/bf16xbf16/fp32/bf16/m{m}n64k64"

_ADDING = """
import sys
from pathlib import Path
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.recording.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
for turn in range(int(sys.argv[2])):
    recorder.add(Problem.parse(f"mm/tn/bf16xbf16/fp32/bf16/m{turn % 10 + 1}n64k64"), sys.argv[3])
    recorder.add("an odd one", sys.argv[3])
"""


def start(path: Path, turns: int, target: str = "sm_90a") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _ADDING, str(path), str(turns), target])


def total(path: Path) -> int:
    recording = Recorder(path).read()
    return recording.problems.total() + recording.undeclarable.total()


def test_gemms_are_merged_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    recorder, other = Recorder(path), Recorder(path)
    assert recorder.read().name == "out"
    for kept_by in (recorder, other, recorder):
        kept_by.add(Problem.parse(KEY.format(m=16)), "sm_90a")
    other.add("an odd one", "sm_100f")
    recording = Recorder(path).read()
    assert recording.problems == {Problem.parse(KEY.format(m=16)): 3}
    assert recording.undeclarable == {"an odd one": 1}
    assert recording.targets == {"sm_90a", "sm_100f"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.yaml"]


def test_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    processes = [start(path, 50, target) for target in ("sm_90a", "sm_100f", "sm_90a")]
    assert [process.wait() for process in processes] == [0, 0, 0]
    recording = Recorder(path).read()
    assert recording.problems == {Problem.parse(KEY.format(m=m)): 15 for m in range(1, 11)}
    assert recording.undeclarable == {"an odd one": 150}
    assert recording.targets == {"sm_90a", "sm_100f"}


def test_a_killed_process_leaves_a_whole_file_and_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    known = 0
    for _ in range(8):
        process = start(path, 1_000_000)
        while total(path) < known + 20:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert total(path) >= known + 20
        known = total(path)
    Recorder(path).add("an odd one", "sm_90a")
    assert total(path) == known + 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.yaml"], "what was partial is gone"


def test_a_child_that_was_forked_while_the_file_was_locked_holds_nobody_up(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out.yaml")
    recorder.add("an odd one", "sm_90a")
    with recorder._locked():
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
    try:
        recorder.add("an odd one", "sm_90a")
        assert total(tmp_path / "out.yaml") == 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_reader_that_locks_the_directory_holds_nobody_up(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out.yaml")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        recorder.check()
        recorder.add("an odd one", "sm_90a")
    finally:
        os.close(directory)
    assert total(tmp_path / "out.yaml") == 1


def test_an_empty_file_is_no_recording_yet(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    path.touch()
    Recorder(path).check()
    assert path.read_bytes() == b""
    Recorder(path).add("an odd one", "sm_90a")
    assert total(path) == 1


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "elsewhere/out.yaml")
    Recorder(link).add("an odd one", "sm_90a")
    assert link.is_symlink()
    assert total(tmp_path / "elsewhere/out.yaml") == 1


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    Recorder(tmp_path / "out.yaml").check()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["version: 1\nname: mine\n", "\ufeff", b"\xff\xfe".decode("latin-1"), "x" * 100]
)
def test_a_file_that_is_no_recording_is_refused_and_left(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="latin-1" if "\xff" in text else "utf-8")
    before = path.read_bytes()
    for act in (Recorder(path).check, lambda: Recorder(path).add("an odd one", "sm_90a")):
        with pytest.raises(RecordError, match=r"mine\.yaml: not a recording, or an edit"):
            act()
    assert path.read_bytes() == before


def test_a_file_that_is_edited_meanwhile_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    recorder = Recorder(path)
    recorder.add(Problem.parse(KEY.format(m=16)), "sm_90a")
    path.write_text(path.read_text().replace("m: 16", "m: [16, 32]"))
    with pytest.raises(RecordError, match=r"line 6 is '- \{op: mm"):
        recorder.add("an odd one", "sm_90a")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("missing/out.yaml", "No such file or directory"),
        ("file/out.yaml", "Not a directory"),
        ("directory", "not a regular file"),
        ("device", "not a regular file"),
        ("o" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    recorder = Recorder(tmp_path / place)
    for act in (recorder.check, lambda: recorder.add("an odd one", "sm_90a")):
        with pytest.raises(RecordError, match=f"{why}; name another file, by NVGEMM_AOT_RECORD"):
            act()


@pytest.mark.parametrize(
    ("wanted", "capability", "target"),
    [
        ("", (9, 0), "sm_90a"),
        ("", (10, 0), "sm_100f"),
        ("", (10, 3), "sm_103a"),
        ("", (8, 0), "sm_100f"),
        ("", None, "sm_100f"),
        ("sm_100a", (9, 0), "sm_100a"),
        ("sm_90a", None, "sm_90a"),
    ],
)
def test_what_to_build_for(wanted: str, capability: tuple[int, int] | None, target: str) -> None:
    variables = {"NVGEMM_AOT_RECORD_TARGET": wanted}
    found = recorded_target(capability, "linux_x86_64", "cu13", variables)
    assert found == Target(arch=target)


@pytest.mark.parametrize(
    ("wanted", "platform", "cuda", "entry"),
    [
        ("", "linux_x86_64", "cu13", "sm_100f"),
        ("", "linux_x86_64", None, "sm_100f"),
        ("", "darwin_arm64", "cu11", "sm_100f"),
        ("", "linux_x86_64", "cu12", "{arch: sm_100f, cuda: cu12}"),
        ("", "linux_aarch64", "cu13", "{arch: sm_100f, platform: linux_aarch64}"),
        ("sm_90a", "linux_aarch64", "cu12", "{arch: sm_90a, platform: linux_aarch64, cuda: cu12}"),
        ("sm_90a-cu13", "linux_aarch64", "cu12", "{arch: sm_90a, platform: linux_aarch64}"),
        ("sm_90a-linux_x86_64-cu13", "linux_aarch64", "cu12", "sm_90a"),
    ],
)
def test_platform_and_cuda_are_those_of_the_process_unless_named(
    wanted: str, platform: str, cuda: str | None, entry: str, tmp_path: Path
) -> None:
    variables = {"NVGEMM_AOT_RECORD_TARGET": wanted}
    target = recorded_target((10, 0), platform, cuda, variables)
    assert target_entry(target) == entry
    path = tmp_path / "recorded.yaml"
    Recorder(path).add(Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m16n64k64"), entry)
    built, *_ = load_manifest(path).targets
    assert built.target == target
    on_arm = {"sm_100f": "GB200", "sm_90a": "H200"}
    if target.platform == "linux_aarch64":
        assert built.device.name == on_arm[target.arch]


def test_what_nothing_builds_for_is_an_error() -> None:
    said = "no provider builds for this target; allowed: "
    with pytest.raises(RecordError, match=rf"sm_80: {said}.*sm_90a"):
        named_target({"NVGEMM_AOT_RECORD_TARGET": "sm_80"})
    with pytest.raises(RecordError, match=rf"sm_90a-cu11: {said}.*cu12"):
        recorded_target(None, "linux_x86_64", None, {"NVGEMM_AOT_RECORD_TARGET": "sm_90a-cu11"})
