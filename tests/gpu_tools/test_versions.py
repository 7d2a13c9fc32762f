"""The matrix of versions, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import versions
from versions import LIBRARY, TVM_FFI, Outcome

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import BuiltBundle

ANSWER = {"result": "exact", "device": "a GPU", "torch": "2.13.0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "expected"),
    [("launches", "kernels exact"), ("failure", "TypeError: kernel ")],
)
def test_a_process_says_what_ran_and_with_which_libraries(
    cpu_bundle: BuiltBundle, part: str, expected: str
) -> None:
    child = Path(versions.__file__).with_name("versions_child.py")
    done = subprocess.run(
        [sys.executable, str(child), part],
        env={**os.environ, "NVGEMM_AOT_BUNDLES": str(cpu_bundle.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert expected in answer["result"]
    assert answer["library"] != "none"
    assert Path(answer["tvm_ffi_file"]).is_file()


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: dict[str, Outcome]
) -> tuple[int, int]:
    """Exit code, and number of processes, where each part of each pair ends as is dictated."""
    asked = []

    def child(part: str, parts: list[Path], bundles: list[Path]) -> Outcome:
        asked.append((part, *(place.name for place in parts)))
        return outcomes[part]

    monkeypatch.setattr(versions, "_child", child)
    for name in ("unpack", "unpack_library"):
        monkeypatch.setattr(versions, name, lambda *_: None)
    code = versions.run(tmp_path)
    assert len(set(asked)) == len(asked)
    return code, len(asked)


def test_every_pair_is_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Outcome(answer=ANSWER, error="")
    pairs = len(TVM_FFI) * len(LIBRARY)
    outcomes = {"launches": good, "failure": good}
    assert run(monkeypatch, tmp_path, outcomes) == (0, 2 * pairs)
    out = capsys.readouterr().out
    for ffi in TVM_FFI:
        for library in LIBRARY:
            assert f"| {ffi} | {library} | exact | exact |" in out
    assert f"{pairs} pairs, 0 of {2 * pairs} processes failed" in out


def test_a_process_that_fails_is_seen_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Outcome(answer=None, error="FAILED (-11): no output")
    outcomes = {"launches": Outcome(answer=ANSWER, error=""), "failure": bad}
    code, _ = run(monkeypatch, tmp_path, outcomes)
    assert code == 1
    assert "| exact | FAILED (-11): no output |" in capsys.readouterr().out


def test_a_library_from_elsewhere_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pair that a row names must be the one that ran."""
    answer = ANSWER | {"library_file": "/elsewhere/lib.so", "tvm_ffi_file": f"{tmp_path}/f.py"}
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps(answer), stderr="")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: done)
    outcome = versions._child("launches", [tmp_path, tmp_path], [])
    assert outcome.answer is None
    assert outcome.text == f"FAILED: /elsewhere/lib.so is not in {tmp_path}"


def test_the_bundles_are_for_two_architectures_and_of_the_same_signatures() -> None:
    manifest = load_manifest(Path(versions.__file__).with_name("versions.yaml"))
    assert len({target.target.arch for target in manifest.targets}) == 2
