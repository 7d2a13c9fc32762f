"""``verify`` and ``inspect`` of wheels and directories, as ``coverage`` takes them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvgemm_aot.cli.main import main
from nvgemm_aot.workload.find_bundles import find_bundles, read_bundles
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError, VerificationError
from paged_bundles import write_in_pages
from synthetic_bundles import write_synthetic_bundle
from synthetic_content import synthetic_content
from written_wheels import write_wheel


@pytest.fixture
def bundles(tmp_path: Path) -> list[Path]:
    (tmp_path / "dist").mkdir()
    return [
        write_synthetic_bundle(tmp_path / f"dist/{arch}.nvgemm", arch)
        for arch in ("sm_100f", "sm_90a")
    ]


@pytest.fixture
def wheel(bundles: list[Path], tmp_path: Path) -> Path:
    return write_wheel(bundles, name="demo", version="1.0", out_dir=tmp_path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def members(wheel: Path) -> list[str]:
    return [
        f"{wheel}/nvgemm_kernels_demo/{arch}-linux_x86_64-cu13.nvgemm"
        for arch in ("sm_100f", "sm_90a")
    ]


def test_a_wheels_bundles_are_found_whole_or_by_their_headers(
    wheel: Path, bundles: list[Path]
) -> None:
    whole = [(one.name, one.file.read_bytes()) for one in find_bundles(wheel, headers_only=False)]
    assert whole == [(name, one.read_bytes()) for name, one in zip(members(wheel), bundles)]
    sizes = [one.file.stat().st_size for one in find_bundles(wheel)]
    assert sizes == [one.stat().st_size for one in bundles]


def test_inspect_shows_each_bundle_of_a_wheel_and_of_a_directory(
    wheel: Path, bundles: list[Path]
) -> None:
    alone = [json.loads(run("inspect", one, "--json").stdout) for one in bundles]
    for path, names in ((wheel, members(wheel)), (bundles[0].parent, [str(b) for b in bundles])):
        shown = json.loads(run("inspect", path, "--json").stdout)
        assert shown == [{**one, "path": name} for one, name in zip(alone, names)]
        text = run("inspect", path).stdout
        assert [line for line in text.splitlines() if line in names] == names


def test_verify_judges_each_bundle_of_a_wheel_and_of_a_directory(
    wheel: Path, bundles: list[Path]
) -> None:
    result = run("verify", "--no-disassemble", "--json", bundles[0].parent, wheel)
    shown = json.loads(result.stdout)
    assert [one["path"] for one in shown] == [*map(str, bundles), *members(wheel)]
    assert [one["kernels"] for one in shown[:2]] == [one["kernels"] for one in shown[2:]]


def test_the_runtimes_wheel_beside_others_is_passed_over(wheel: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "nvgemm_aot-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(runtime, "w") as archive:
        archive.writestr("nvgemm_runtime/__init__.py", "")
    shown = json.loads(run("verify", "--no-disassemble", "--json", runtime, wheel).stdout)
    assert [one["path"] for one in shown] == members(wheel)
    assert [one.name for one in read_bundles([runtime, wheel])] == members(wheel)
    alone = run("verify", runtime)
    assert alone.exit_code == StorageError.exit_code
    assert "holds no .nvgemm file" in alone.stderr


def test_a_directory_of_wheels_alone_gives_those_of_kernels(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    wheel = wheel.rename(tmp_path / "wheels" / wheel.name)
    with zipfile.ZipFile(wheel.parent / "nvgemm_aot-0.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("nvgemm_runtime/__init__.py", "")
    shown = json.loads(run("verify", "--no-disassemble", "--json", wheel.parent).stdout)
    assert [one["path"] for one in shown] == members(wheel)


def repack(wheel: Path, damaged: str, out: Path) -> Path:
    """Copy a wheel with one bundle cut."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:-1] if damaged in name else data)
    return out


def test_a_broken_bundle_of_a_wheel_is_named_once_and_the_others_are_judged(
    wheel: Path, tmp_path: Path
) -> None:
    bad = repack(wheel, "sm_100f", tmp_path / "bad.whl")
    result = run("verify", "--no-disassemble", bad)
    first, _ = members(bad)
    assert f"{first}: FAILED\n" in result.stdout
    assert "sm_90a-linux_x86_64-cu13.nvgemm: " in result.stdout
    assert result.output.count(f"{first}: [") == 1, "the reason is printed once"
    assert f"{first}: [" in result.stderr
    assert result.exit_code in (BundleFormatError.exit_code, VerificationError.exit_code)
    inspected = run("inspect", bad)
    assert inspected.exit_code == BundleFormatError.exit_code
    assert inspected.stderr.startswith(f"nvgemm-aot: error: {first}: [")


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_wheel_or_directory_without_bundles_and_no_wheel_are_errors(
    command: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "none.whl", "w") as empty:
        empty.writestr("a", "b")
    (tmp_path / "text.whl").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("none.whl", "holds no .nvgemm file"),
        ("folder", "holds no .nvgemm file"),
        ("text.whl", "incomplete wheel"),
        ("missing.whl", "No such file"),
    ):
        result = run(command, tmp_path / name)
        assert result.exit_code == StorageError.exit_code
        assert result.output.count(f"{tmp_path / name}: ") == (2 if command == "verify" else 1)
        assert result.output.count(said) == 1


def test_a_header_in_pages_is_unpacked_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.nvgemm"
    with write_in_pages(path, synthetic_content(kernels=5, problems=4)) as bundle:
        header = bundle.header
    wheel = write_wheel([path], name="a", version="1.0", out_dir=tmp_path / "dist")
    headers = []
    for named in find_bundles(wheel):
        with Bundle(named.file) as unpacked:
            headers.append(unpacked.header)
    assert headers == [header]
