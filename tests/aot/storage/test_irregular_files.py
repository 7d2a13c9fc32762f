"""Files that a user names: what is none is refused at once, by every command that reads one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvgemm_aot.storage import files
from nvgemm_aot.storage.files import IrregularFileError, open_regular, read_start

_COMMAND = [sys.executable, "-c", "from nvgemm_aot.cli.main import main; main()"]
_LONG_S = 300
"""Only a command that waits for a writer takes so long."""

_GEMM = "- {dtype: bf16, m: 16, n: 64, k: 64}\n"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that nobody writes to."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("build {pipe} --dry-run", 10),
        ("coverage {pipe}", 10),
        ("coverage quickstart {pipe}", 16),
        ("coverage quickstart {pipe}.whl", 16),
        ("manifest from-config {pipe} --tokens 1", 10),
        ("inspect {pipe}", 16),
        ("verify {pipe}", 16),
        ("wheel {pipe} --name x", 16),
    ],
)
def test_no_command_waits_for_a_pipe(pipe: Path, command: str, status: int) -> None:
    os.mkfifo(f"{pipe}.whl")
    words = command.format(pipe=pipe).split()
    done = subprocess.run(
        [*_COMMAND, *words], capture_output=True, text=True, timeout=_LONG_S, check=False
    )
    assert done.returncode == status, done.stderr
    assert "regular file" in done.stderr


def test_a_manifest_may_come_through_a_pipe_that_is_written_to(pipe: Path) -> None:
    """As from the shell's ``<(...)``, however late it comes; every command reads it once."""
    words = ["coverage", str(pipe), "--fail-under", "0"]
    with subprocess.Popen([*_COMMAND, *words], stdout=subprocess.PIPE, text=True) as command:
        with pipe.open("w") as file:  # returns when the command has opened it
            for line in ("version: 1\nname: x\ntargets: [sm_90a]\n", "gemms:\n", _GEMM):
                file.write(line)
                file.flush()
        assert "mm/tn/bf16xbf16/fp32/bf16/m16n64k64" in command.communicate(timeout=_LONG_S)[0]
    assert command.returncode == 0


def test_a_pipe_whose_writer_is_silent_is_refused(
    pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST_SILENCE_S", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as file:
        file.write(b"some")
        file.flush()
        assert read_start(Path(f"/dev/fd/{reader}"), 4) == b"some"
        with pytest.raises(IrregularFileError, match=r"a pipe whose writer wrote nothing for 0.01"):
            read_start(Path(f"/dev/fd/{reader}"), 4)


def test_a_pipe_that_nobody_writes_to_says_what_to_do(pipe: Path) -> None:
    with pytest.raises(IrregularFileError) as raised:
        read_start(pipe, 100)
    assert str(raised.value) == (
        f"{pipe}: this is a pipe without a writer, must be a regular file; write its content to a "
        "file and name that"
    )
    with pytest.raises(IrregularFileError, match=r"this is a pipe, must be a regular file"):
        open_regular(pipe)


def test_standard_input_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        program = (
            "from pathlib import Path; from nvgemm_aot.storage.files import read_start; "
            "print(read_start(Path('/dev/stdin'), 99))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=file, capture_output=True, text=True, check=True
        )
    assert done.stdout == "b'content'\n"


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


def test_sockets_and_devices_are_refused_by_name(listening: Path) -> None:
    with pytest.raises(IrregularFileError, match=r"socket: this is a socket, must be a regular"):
        open_regular(listening)
    with pytest.raises(IrregularFileError, match=r"/dev/zero: this is a device"):
        open_regular(Path("/dev/zero"))


def test_a_directory_and_what_is_missing_stay_what_they_are(tmp_path: Path) -> None:
    before = {*Path("/proc/self/fd").iterdir()}
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    assert {*Path("/proc/self/fd").iterdir()} == before
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
