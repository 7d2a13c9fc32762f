from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvgemm_aot.bundle import repack_runtime
from nvgemm_aot.bundle.wheel_names import identify, refuse_other_versions
from nvgemm_aot.cli.build.packing import Runtime, wheel_lines, write_wheels
from nvgemm_aot.cli.main import main
from nvgemm_runtime.errors import PackagingError
from synthetic_bundles import write_synthetic_bundle

RUNTIME = Runtime(
    filename="nvgemm_aot-0.1.0-py3-none-manylinux_2_28_x86_64.whl", data=b"the runtime"
)


def written(out: Path, runtime: Runtime, *platforms: str) -> list[str]:
    """Pack a bundle for each platform; returns the printed lines."""
    bundles = {
        one: [write_synthetic_bundle(out / f"{one}.nvgemm", "sm_90a", platform=one)]
        for one in platforms
    }
    document = write_wheels(
        bundles, runtime, name="mine", version="1.0", summary=None, out=out / "dist"
    )
    return wheel_lines(json.loads(json.dumps(document)))


def test_the_runtime_is_written_beside_kernels_of_its_platform(tmp_path: Path) -> None:
    lines = written(tmp_path, RUNTIME, "linux_x86_64")
    assert (tmp_path / "dist" / RUNTIME.filename).read_bytes() == b"the runtime"
    kernels = "nvgemm_kernels_mine-1.0-py3-none-manylinux_2_28_x86_64.whl"
    assert [line.partition(": written")[0] for line in lines] == [
        str(tmp_path / "dist" / kernels),
        str(tmp_path / "dist" / RUNTIME.filename),
    ]


def test_a_platform_that_is_not_this_machines_says_what_makes_its_runtime(tmp_path: Path) -> None:
    lines = written(tmp_path, RUNTIME, "linux_x86_64", "linux_aarch64")
    assert (tmp_path / "dist" / RUNTIME.filename).is_file()
    assert lines[-1].startswith("linux_aarch64: no runtime wheel: the installed one is for")
    assert "python wheels/release --runtime-only --once --platform aarch64" in lines[-1]
    (tmp_path / "dist" / RUNTIME.filename).unlink()
    written(tmp_path, RUNTIME, "linux_aarch64")
    assert not (tmp_path / "dist" / RUNTIME.filename).exists()


def test_kernels_are_written_where_the_runtime_is_not_packed(tmp_path: Path) -> None:
    lines = written(tmp_path, Runtime(problem="it is editable"), "linux_x86_64")
    assert lines[-1] == "linux_x86_64: no runtime wheel: it is editable"
    assert [one.name.split("-")[0] for one in (tmp_path / "dist").iterdir()] == [
        "nvgemm_kernels_mine"
    ]


@pytest.mark.parametrize("command", [("build", "quickstart", "--wheel"), ("wheel", "BUNDLE")])
def test_another_runtime_in_the_directory_is_refused_before_anything_is_made(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack_runtime, "packing_refusal", lambda: None)
    monkeypatch.setattr(repack_runtime, "encode_runtime_wheel", lambda: (RUNTIME.filename, b""))
    bundle = write_synthetic_bundle(tmp_path / "some.nvgemm", "sm_90a")
    out = tmp_path / "dist"
    out.mkdir()
    other = out / RUNTIME.filename.replace("0.1.0", "0.0.9")
    other.touch()
    words = [str(bundle) if one == "BUNDLE" else one for one in command]
    words += ["--name", "some"] if command[0] == "wheel" else []
    result = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert result.exit_code == PackagingError.exit_code
    assert f"{other} is another runtime wheel than {RUNTIME.filename}" in str(result.output)
    assert list(out.iterdir()) == [other]


@pytest.mark.parametrize("command", [("build", "quickstart", "--wheel"), ("wheel", "BUNDLE")])
def test_another_version_of_the_kernels_in_the_directory_is_refused_before_anything_is_made(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    bundle = write_synthetic_bundle(tmp_path / "some.nvgemm", "sm_90a")
    out = tmp_path / "dist"
    out.mkdir()
    other = out / "nvgemm_kernels_quickstart-0.0.9-py3-none-manylinux_2_28_x86_64.whl"
    other.touch()
    words = [str(bundle) if one == "BUNDLE" else one for one in command]
    words += ["--name", "quickstart"] if command[0] == "wheel" else []
    result = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert result.exit_code == PackagingError.exit_code
    assert f"{other} is another version than 0.1.0, which this command" in result.output
    assert list(out.iterdir()) == [other]


def test_wheels_of_other_kernels_and_of_this_version_are_left(tmp_path: Path) -> None:
    refuse_other_versions(tmp_path / "missing", identify("mine", "1.0"))
    for name in ("mine-1.0-py3-none-manylinux_2_28_aarch64", "mine_too-0.9-py3-none-any"):
        (tmp_path / f"nvgemm_kernels_{name}.whl").touch()
    refuse_other_versions(tmp_path, identify("mine", "1.0"))
    with pytest.raises(PackagingError, match="mine_too-0"):
        refuse_other_versions(tmp_path, identify("mine-too", "1.0"))
