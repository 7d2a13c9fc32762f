"""What says which release of a dependency is outside its bound; the index is a stand-in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import newest
from newest import DEPENDENCIES, IndexSilentError, Standing
from repository import ROOT

BOUNDS = newest.bounds(newest.read_project())
each = pytest.mark.parametrize("dependency", DEPENDENCIES, ids=lambda one: one.name)


def standing(bound: str, release: str) -> Standing:
    return Standing(dependency=DEPENDENCIES[0], bound=SpecifierSet(bound), newest=Version(release))


def lowest(name: str) -> Version:
    """A release that the bound of pyproject.toml lets in: its lower end."""
    return max(
        Version(re.sub("[^0-9.]", "", str(one))) for one in BOUNDS[name] if "<" not in str(one)
    )


@pytest.mark.parametrize(
    ("bound", "release", "wider"),
    [
        (">=2.11,<2.16", "2.16.0", ">=2.11,<2.17"),
        (">=2.11,<2.16", "3.0.1", ">=2.11,<3.1"),
        (">=0.1.9,<0.2", "0.2.0.post1", ">=0.1.9,<0.3"),
        (">=13.4,<14", "14.2", ">=13.4,<15"),
        ("==0.6.5", "0.7.0", "==0.7.0"),
    ],
)
def test_a_widened_bound_lets_the_newest_in(bound: str, release: str, wider: str) -> None:
    found = standing(bound, release)
    assert not found.is_inside
    assert found.wider == wider
    assert Version(release) in SpecifierSet(found.wider)


def test_a_release_below_the_bound_is_not_widened_to() -> None:
    with pytest.raises(ValueError, match="older than the bound"):
        _ = standing(">=2.11,<2.16", "2.10.0").wider


def test_all_inside_prints_a_table_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert newest.main([], lowest) == 0
    said = capsys.readouterr().out
    assert all(one.name in said for one in DEPENDENCIES)
    assert "NO" not in said
    assert "pyproject" not in said


def test_what_is_outside_gets_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    def newest_of(name: str) -> Version:
        return Version("99.1") if name == "torch" else lowest(name)

    assert newest.main([], newest_of) == 1
    said = capsys.readouterr().out
    assert re.search(r"^torch +\S+ +99\.1 +NO$", said, re.MULTILINE)
    assert "tests/with_torch.sh 99.1" in said
    assert "<99.2" in said
    assert "apache-tvm-ffi 0" not in said, "only torch is outside"


def test_a_named_dependency_gets_its_commands_inside_its_bound_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert newest.main(["apache-tvm-ffi"], lowest) == 0
    said = capsys.readouterr().out
    assert "lets it in already" in said
    assert "versions.py run" in said
    assert "torch " not in said


def test_an_index_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def newest_of(name: str) -> Version:
        raise IndexSilentError(f"{name}: no route to host")

    assert newest.main([], newest_of) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "torch: no route to host" in said.err
    assert "where pip reaches an index" in said.err


def answered(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str = "") -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-3:] == ["index", "versions", "torch"]
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(newest.subprocess, "run", run)


def test_pips_list_is_read_by_version_and_without_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, 0, "torch (2.9.1)\nAvailable versions: 2.9.1, 2.10.0+cpu, 2.10.0\n")
    assert newest.ask_pip("torch") == Version("2.10.0")


def test_pips_error_says_that_the_index_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(IndexSilentError, match="torch: ERROR: No matching distribution found"):
        newest.ask_pip("torch")


@each
def test_commands_and_places_name_files_of_the_repository(dependency: newest.Dependency) -> None:
    assert dependency.name in BOUNDS
    text = "\n".join(
        Standing(dependency=dependency, bound=BOUNDS[dependency.name], newest=Version("99")).lines()
    )
    assert "{" not in text
    files = re.findall(r"[\w./-]+/[\w./-]+\.(?:py|md|sh|yaml)\b|[\w-]+\.(?:toml|txt|md)\b", text)
    assert "pyproject.toml" in files
    for file in {*files, *re.findall(r"tests/gpu/run\b", text)}:
        assert Path(ROOT, file).is_file(), file
