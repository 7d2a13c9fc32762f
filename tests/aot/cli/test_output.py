"""Output that cannot be written: one line on standard error, and an exit code of its kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from forked_scripts import ForkedScripts, forked_scripts
from nvgemm_runtime.errors import NvgemmError, PackagingError, StorageError
from repository import TESTS
from synthetic_bundles import write_synthetic_bundle

MANIFEST = """version: 1
name: one
targets: [sm_90a]
gemms: [{m: 16, n: 64, k: 64, dtype: bf16}]
"""


COMMAND = """
import os, resource, sys
stdout, stderr, limit = sys.argv[1:4]
for descriptor, path in enumerate((stdout, stderr), 1):
    os.dup2(os.open(path, os.O_WRONLY), descriptor)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
sys.argv[1:] = sys.argv[4:]
from nvgemm_aot.__main__ import main
try:
    main()
except SystemExit as end:
    sys.stdout.flush()
    os._exit(end.code or 0)  # taking down what was imported takes a second
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkedScripts]:
    """Processes that have imported what commands import last, which takes seconds."""
    imports = "import cutlass.operators, torch._dynamo, nvgemm_aot.cli.main"
    with forked_scripts(imports, python=[sys.executable]) as scripts:
        yield scripts


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(directory: Path, scripts: ForkedScripts) -> Run:
    """Runs a command whose output goes to these files, which can have ``limit`` bytes."""
    pipe = directory / "said"  # which no limit holds for
    os.mkfifo(pipe)

    def run(
        arguments: Sequence[str], stdout: str = os.devnull, stderr: str = str(pipe), limit: int = -1
    ) -> subprocess.CompletedProcess[str]:
        with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as said:  # noqa: PTH123
            environment = {**os.environ, "NVGEMM_AOT_CACHE": str(directory / "cache")}
            done = scripts.run(
                COMMAND, stdout, stderr, str(limit), *arguments,
                environment=environment, directory=directory,
            )  # fmt: skip
            assert not done.stderr
            done.stderr = said.read()
        return done

    return run


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
def test_a_full_disk_for_standard_output_is_one_line(run: Run, command: str) -> None:
    done = run([command, *COMMANDS[command]], "/dev/full")
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
    run: Run, arguments: list[str], written: str
) -> None:
    config = str(TESTS / "data/configs/llama-3.1-8b.json")
    arguments = [config if one == "{config}" else one for one in arguments]
    done = run(arguments, limit=300)
    lines = done.stderr.splitlines()
    assert done.returncode == StorageError.exit_code
    assert len(lines) == 1
    assert lines[0].startswith("nvgemm-aot: error: ")
    assert written in lines[0]
    assert "File too large" in lines[0]
    assert "free space" not in lines[0]


def test_errors_keep_their_exit_code_where_nothing_can_be_said(directory: Path, run: Run) -> None:
    (directory / "bad.nvgemm").write_bytes(b"bad")
    status = run(["inspect", "bad.nvgemm"]).returncode
    assert status in {one.exit_code for one in NvgemmError.__subclasses__()} - {16}
    assert run(["inspect", "bad.nvgemm"], stderr="/dev/full").returncode == status


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


def test_a_name_that_is_too_long_for_a_file_is_refused(run: Run) -> None:
    done = run(["wheel", "one.nvgemm", "--name", "a" * 300])
    assert done.returncode == PackagingError.exit_code
    assert "name and version have 320 characters, at most 180 fit a file's name" in done.stderr
