"""Output that cannot be written: one line on standard error, and an exit code of its kind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvgemm_runtime.errors import NvgemmError, PackagingError, StorageError
from repository import TESTS
from synthetic_bundles import write_synthetic_bundle

MANIFEST = """version: 1
name: one
targets: [sm_90a]
gemms: [{m: 16, n: 64, k: 64, dtype: bf16}]
"""


def run(
    directory: Path, arguments: Sequence[str], stdout: str = "", stderr: str = "", limit: int = -1
) -> subprocess.CompletedProcess[str]:
    """Run a command whose output goes to files of these names, which can have ``limit`` bytes."""
    with (
        open(stdout or os.devnull, "w") as out,  # noqa: PTH123
        open(stderr or os.devnull, "w") as said,  # noqa: PTH123
    ):
        return subprocess.run(
            [sys.executable, "-m", "nvgemm_aot", *arguments],
            cwd=directory,
            env={**os.environ, "NVGEMM_AOT_CACHE": str(directory / "cache")},
            stdout=out,
            stderr=said if stderr else subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text(MANIFEST)
    write_synthetic_bundle(tmp_path / "one.nvgemm", "sm_90a")
    return tmp_path


COMMANDS = {
    "--version": (),
    "--help": (),
    "schema": (),
    "list": ("--json",),
    "doctor": (),
    "inspect": ("one.nvgemm",),
    "verify": ("--no-disassemble", "one.nvgemm"),
    "coverage": ("one.yaml", "one.nvgemm"),
    "explain": ("--", "true"),
    "cache": ("path",),
    "rankings": ("show", "llama-3.1-8b"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_for_standard_output_is_one_line(directory: Path, command: str) -> None:
    done = run(directory, [command, *COMMANDS[command]], "/dev/full")
    assert done.returncode == StorageError.exit_code
    said = "nvgemm-aot: error: standard output: No space left on device; free space there"
    assert [line for line in done.stderr.splitlines() if "Verifying" not in line] == [said]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["wheel", "one.nvgemm", "--name", "a"], "temporary directory"),
        (["build", "one.yaml", "--dry-run", "--rejections", "why"], "why: cannot write"),
        (["coverage", "one.yaml", "one.nvgemm", "--html", "page"], "page: cannot write"),
        (["manifest", "from-config", "{config}", "--tokens", "1", "-o", "m"], "m: cannot write"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_file_that_cannot_be_written_is_one_line(
    directory: Path, arguments: list[str], written: str
) -> None:
    config = str(TESTS / "data/configs/llama-3.1-8b.json")
    arguments = [config if one == "{config}" else one for one in arguments]
    done = run(directory, arguments, limit=300)
    lines = done.stderr.splitlines()
    assert done.returncode == StorageError.exit_code
    assert len(lines) == 1
    assert lines[0].startswith("nvgemm-aot: error: ")
    assert written in lines[0]
    assert "File too large" in lines[0]
    assert "free space" not in lines[0]


def test_errors_keep_their_exit_code_where_nothing_can_be_said(directory: Path) -> None:
    (directory / "bad.nvgemm").write_bytes(b"bad")
    status = run(directory, ["inspect", "bad.nvgemm"]).returncode
    assert status in {one.exit_code for one in NvgemmError.__subclasses__()} - {16}
    assert run(directory, ["inspect", "bad.nvgemm"], stderr="/dev/full").returncode == status


def test_a_deleted_directory_is_one_line(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; pathlib.Path('gone').mkdir(); os.chdir('gone')\n"
        "pathlib.Path('../gone').rmdir(); sys.argv = ['', *sys.argv[1:]]\n"
        "from nvgemm_aot.__main__ import main; main()"
    )
    for arguments in (["list"], ["build", "quickstart"], ["tune", "a.nvgemm", "-o", "b.nvgemm"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == StorageError.exit_code
        assert done.stderr.startswith("nvgemm-aot: error: the current directory: No such file or")
        assert done.stderr.count("\n") == 1


def test_a_name_that_is_too_long_for_a_file_is_refused(directory: Path) -> None:
    done = run(directory, ["wheel", "one.nvgemm", "--name", "a" * 300])
    assert done.returncode == PackagingError.exit_code
    assert "name and version have 320 characters, at most 180 fit a file's name" in done.stderr
