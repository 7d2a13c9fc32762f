"""``nvgemm-aot merge`` and ``split`` as commands."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.main import main
from nvgemm_runtime.errors import BundleFormatError, PackagingError, StorageError
from nvgemm_runtime.installed.signatures import read_signatures
from signing_keys import new_key, set_policy, sign_bundle
from varied_content import SIGNATURES, made_kernel, measured, measurement, varied_content

TARGET = "sm_90a-linux_x86_64-cu13"
NAME = f"mine-{TARGET}.nvgemm"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_bundle(Path(NAME), varied_content())
    return tmp_path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def files() -> list[str]:
    return sorted(path.as_posix() for path in Path().rglob("*") if path.is_file())


def test_parts_are_named_and_merge_into_the_original() -> None:
    result = run("split", NAME, "--parts", "3", "-o", "out", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    names = [Path(part["path"]).name for part in document["parts"]]
    assert names == [f"mine-{number}of3-{TARGET}.nvgemm" for number in (1, 2, 3)]
    assert document["copies"] == 0
    result = run("merge", *Path("out").iterdir(), "-o", "again.nvgemm")
    assert ": written, " in result.output
    assert "16 kernels for 36 problems, equal to the bundle that was split" in result.output
    assert Path("again.nvgemm").read_bytes() == Path(NAME).read_bytes()


def test_the_largest_part_can_be_named() -> None:
    size = Path(NAME).stat().st_size
    result = run("split", NAME, "--max-size", str(size), "-o", "out")
    assert f"out/mine-1of1-{TARGET}.nvgemm: written" in result.output
    result = run("split", NAME, "--max-size", "1k", "-o", "elsewhere")
    assert result.exit_code == PackagingError.exit_code
    assert "at most 1000 are allowed, and a row stays together; allow more" in result.output
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize("words", [["--parts", "2", "--max-size", "90M"], []])
def test_split_needs_one_measure(words: list[str]) -> None:
    result = run("split", NAME, *words)
    assert result.exit_code == 2
    assert "name either --parts or --max-size" in result.output


@pytest.mark.parametrize("text", ["", "90X", "-1", "0", "0.1", "M"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    result = run("split", NAME, "--max-size", text)
    assert result.exit_code == 2
    assert "is not a size such as 90M or 95MiB" in result.output or "less than" in result.output


def test_parts_of_another_division_in_the_directory_are_refused() -> None:
    run("split", NAME, "--parts", "3", "-o", "out")
    before = files()
    result = run("split", NAME, "--parts", "2", "-o", "out")
    assert result.exit_code == PackagingError.exit_code
    assert f"out/mine-1of3-{TARGET}.nvgemm is a part of another division" in result.output
    assert files() == before
    assert run("split", NAME, "--parts", "3", "-o", "out").exit_code == 0


def test_parts_that_cannot_all_be_written_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = run("split", NAME, "--parts", "3", "-o", "out")
    assert result.exit_code == StorageError.exit_code
    assert "No space left on device; free space there" in result.output
    assert files() == [NAME]


def test_an_interruption_leaves_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupt(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    assert run("split", NAME, "--parts", "3", "-o", "out").exit_code == 130
    assert files() == [NAME]


def test_what_merging_drops_is_said() -> None:
    content = varied_content(rows=1)
    kernels = [made_kernel(SIGNATURES[0], number) for number in range(3)]
    problem = content.rankings[0].problem
    for name, uuid, fastest in (("one", "a", 0), ("two", "b", 1)):
        times = {kernels[fastest].id: 1000, kernels[1 - fastest].id: 2000, kernels[2].id: 3000}
        times = dict(list(times.items())[: 2 + fastest])
        write_bundle(
            Path(f"{name}.nvgemm"),
            replace(
                content,
                kernels=tuple(kernel for kernel in kernels if kernel.id in times),
                rankings=(measured(problem, times, measurement(uuid=uuid)),),
                unserved={},
            ),
        )
    result = run("merge", "one.nvgemm", "two.nvgemm", "-o", "both.nvgemm")
    assert result.exit_code == 0, result.output
    assert "times of 1 measurement not kept (1 contradict the one kept)" in result.output
    assert "two runs disagree: kernel" in result.output
    document = json.loads(
        run("merge", "two.nvgemm", "one.nvgemm", "-o", "both.nvgemm", "--json").stdout
    )
    [superseded] = document["superseded"]
    assert superseded["problem"] == problem.key
    assert superseded["relation"] == "contradicts"


def test_the_output_must_be_a_bundle_of_its_own() -> None:
    result = run("merge", NAME, "-o", f"./{NAME}")
    assert result.exit_code == 2
    assert f"{NAME} is among the bundles to merge; name another output" in result.output
    assert run("merge", NAME, "-o", "some.txt").exit_code == 2
    Path("some.nvgemm").mkdir()
    result = run("merge", NAME, "-o", "some.nvgemm")
    assert result.exit_code == StorageError.exit_code
    assert files() == [NAME]


@pytest.mark.parametrize("command", [("merge", "-o", "o.nvgemm"), ("split", "--parts", "1")])
def test_what_is_no_bundle_is_refused(command: tuple[str, ...]) -> None:
    Path("text.nvgemm").write_text("text" * 99)
    Path("folder.nvgemm").mkdir()
    for name, error, message in (
        ("text.nvgemm", BundleFormatError, "[magic]"),
        ("folder.nvgemm", StorageError, "not a regular file; name a bundle"),
        ("missing.nvgemm", StorageError, "cannot open the bundle: No such file"),
    ):
        result = run(*command, name)
        assert result.exit_code == error.exit_code
        assert message in result.output


def test_the_same_bundle_twice_is_that_bundle() -> None:
    result = run("merge", NAME, f"./{NAME}", "-o", "same.nvgemm", "--json")
    assert json.loads(result.stdout)["merged"] == [NAME]
    assert Path("same.nvgemm").read_bytes() == Path(NAME).read_bytes()


def test_signatures_follow_the_content(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(tmp_path, "ci")
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": key})
    refused = run("split", NAME, "--parts", "2", "-o", "parts")
    assert refused.exit_code == 28
    assert f"{NAME}: no key that counts in the policy" in refused.stderr
    sign_bundle(Path(NAME), key)
    unsigned = run("split", NAME, "--parts", "2", "-o", "parts")
    assert unsigned.exit_code == 0, unsigned.output
    parts = sorted(Path("parts").glob("*.nvgemm"))
    assert unsigned.stderr.count("no key that counts in the policy") == 2
    assert run("merge", *parts, "-o", "b.nvgemm").exit_code == 28
    assert not Path("b.nvgemm").exists()
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", str(tmp_path / "ci.pem"))
    assert run("split", NAME, "--parts", "2", "-o", "parts").exit_code == 0
    assert run("merge", *parts, "-o", "b.nvgemm").exit_code == 0
    for path in (*parts, Path("b.nvgemm")):
        assert [one.key_id for one in read_signatures(path)] == [key.id]
    monkeypatch.delenv("NVGEMM_AOT_SIGNING_KEY")
    monkeypatch.delenv("NVGEMM_AOT_POLICY")
    assert run("merge", parts[0], "-o", "b.nvgemm").exit_code == 0
    assert read_signatures(Path("b.nvgemm")) == (), "another content"
