"""Bundles too large for one wheel: several wheels that require each other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from email.parser import BytesParser
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from click.testing import CliRunner

from installed_bundles import install_wheels
from nvgemm_aot.bundle import wheel_set
from nvgemm_aot.bundle.compression import compress_quickly
from nvgemm_aot.bundle.wheel import encode_archive, runtime_requirement
from nvgemm_aot.bundle.wheel_set import EncodedWheel, encode_wheels
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.cli.doctor import diagnosis
from nvgemm_aot.cli.main import main
from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.confirmations import (
    Confirmations,
    ConfirmedTimes,
    encode_confirmations,
)
from nvgemm_runtime.bundle.ranking_entries import Timing
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import PackagingError
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installed import digest, required_wheels
from nvgemm_runtime.installed.discover import find_wheel_bundles
from nvgemm_runtime.installed.required_wheels import missing_wheels
from varied_content import HERE, measurement, varied_content
from written_wheels import write_wheel

LIMIT = 300_000
TAG = "py3-none-manylinux_2_28_x86_64.whl"
NAMES = ("nvgemm-kernels-mine", "nvgemm-kernels-mine-part2", "nvgemm-kernels-mine-part3")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "mine.nvgemm"
    write_bundle(path, varied_content(rows=8, kernels=24, payload_bytes=9000), compress_quickly)
    return path


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_set, "MAX_WHEEL_BYTES", LIMIT)


@pytest.fixture(scope="module")
def wheels(large: Path) -> list[EncodedWheel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel_set, "MAX_WHEEL_BYTES", LIMIT)
        return encode_wheels([large], name="Mine", version="1.0", summary="For my model")


def write(directory: Path, wheels: list[EncodedWheel]) -> list[Path]:
    directory.mkdir(exist_ok=True)
    for wheel in wheels:
        (directory / wheel.filename).write_bytes(wheel.data)
    return [directory / wheel.filename for wheel in wheels]


def fields(path: Path) -> dict[str, list[str]]:
    with ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        message = BytesParser().parsebytes(archive.read(name))
    body = message.get_payload(decode=True)
    assert isinstance(body, bytes)
    return {key: message.get_all(key, []) for key in message} | {"body": [body.decode()]}


def test_each_wheel_is_below_the_limit_and_named_by_its_number(wheels: list[EncodedWheel]) -> None:
    packages = [name.replace("-", "_") for name in NAMES]
    assert [wheel.filename for wheel in wheels] == [f"{name}-1.0-{TAG}" for name in packages]
    assert all(len(wheel.data) <= LIMIT for wheel in wheels)
    assert [(wheel.number, wheel.count) for wheel in wheels] == [(1, 3), (2, 3), (3, 3)]


def test_the_same_bundle_gives_the_same_wheels(wheels: list[EncodedWheel], large: Path) -> None:
    again = encode_wheels([large], name="mine", version="1.0", summary="For my model")
    assert [wheel.data for wheel in again] == [wheel.data for wheel in wheels]


def test_the_first_requires_the_others_and_they_the_first(
    wheels: list[EncodedWheel], tmp_path: Path
) -> None:
    runtime = runtime_requirement(__version__, ["cu13"])
    first, *others = map(fields, write(tmp_path, wheels))
    assert first["Requires-Dist"] == [*(f"{name}==1.0" for name in NAMES[1:]), runtime]
    for number, part in enumerate(others, start=2):
        assert part["Requires-Dist"] == ["nvgemm-kernels-mine==1.0", runtime]
        assert part["Summary"] == [f"For my model (part {number} of 3)"]
        files = " ".join(f"{name.replace('-', '_')}-*.whl" for name in NAMES)
        assert f"pip install nvgemm_aot-*.whl {files}\n" in part["body"][0]


def test_the_longest_summary_still_fits(large: Path, tmp_path: Path) -> None:
    made = encode_wheels([large], name="mine", version="1.0", summary="long" * 128)
    [summary] = fields(write(tmp_path, made)[1])["Summary"]
    assert len(summary) == 512
    assert summary.endswith(" (part 2 of 3)")


def test_the_bill_of_materials_names_the_other_wheels(
    wheels: list[EncodedWheel], tmp_path: Path
) -> None:
    for path, name in zip(write(tmp_path, wheels), NAMES):
        with ZipFile(path) as archive:
            [inner] = [one for one in archive.namelist() if one.endswith(f"{name}.cdx.json")]
            sbom = json.loads(archive.read(inner))
        [root] = [one for one in sbom["dependencies"] if one["ref"] == f"pkg:pypi/{name}@1.0"]
        required = {one for one in root["dependsOn"] if one.startswith("pkg:pypi/nvgemm-kernels")}
        others = NAMES[1:] if name == NAMES[0] else NAMES[:1]
        assert required == {f"pkg:pypi/{other}@1.0" for other in others}
        assert required <= {one["bom-ref"] for one in sbom["components"]}


def test_public_checkers_accept_the_wheels(wheels: list[EncodedWheel], tmp_path: Path) -> None:
    paths = list(map(str, write(tmp_path, wheels)))
    for command in (["twine", "check", "--strict"], ["check_wheel_contents"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, *paths], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_all_parts_are_found_and_hold_every_problem(
    wheels: list[EncodedWheel], large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path, wheels)
    digests = []
    for count in (1, 2, 3):
        install_wheels(monkeypatch, tmp_path / "site", *paths[:count])
        digest.forget()
        digests.append(digest.installed_digest())
    digest.forget()
    assert len(set(digests)) == 3
    found = find_wheel_bundles()
    assert [bundle.distribution for bundle in found] == list(NAMES)
    problems = []
    for bundle in found:
        with Bundle(bundle.path) as opened:
            problems += [ranking.name for ranking in opened.header.rankings]
    with Bundle(large) as whole:
        assert sorted(problems) == sorted(ranking.name for ranking in whole.header.rankings)


def test_a_missing_part_and_one_of_another_version_are_reported(
    wheels: list[EncodedWheel], large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    paths = write(tmp_path / "wheels", wheels)

    def installed(*wheels: Path) -> tuple[str, ...]:
        install_wheels(monkeypatch, site, *wheels)
        monkeypatch.setattr(
            required_wheels, "distributions", lambda: distributions(path=[str(site)])
        )
        return missing_wheels()

    [reason] = installed(*paths[:2])
    assert reason.startswith(
        "nvgemm-kernels-mine 1.0 requires nvgemm-kernels-mine-part3==1.0, and it is not installed"
    )
    monkeypatch.setattr(diagnosis, "missing_wheels", lambda: (reason,))
    assert reason in diagnosis.diagnose()["problems"]
    assert installed(paths[2]) == ()
    for part in site.glob("nvgemm_kernels_mine-*"):
        shutil.rmtree(part)
    newer = encode_wheels([large], name="mine", version="2.0")
    reasons = installed(*write(tmp_path / "wheels", newer[:1]))
    first, *others = NAMES
    assert [reason.partition(";")[0] for reason in reasons] == [
        *(f"{first} 2.0 requires {name}==2.0, and 1.0 is installed" for name in others),
        *(f"{name} 1.0 requires {first}==1.0, and 2.0 is installed" for name in others),
    ]


@pytest.mark.parametrize("file", ["x-1.0.dist-info/METADATA", "x.egg-info/PKG-INFO"])
def test_a_wheel_is_recognized_however_its_name_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(
        "Metadata-Version: 2.1\nname: NVGEMM.kernels_X\nVersion: 1.0\n"
        "Requires-Dist: nvgemm_kernels-x.part2 == 1.0\n"
    )
    monkeypatch.setattr(
        required_wheels, "distributions", lambda: distributions(path=[str(tmp_path)])
    )
    [reason] = missing_wheels()
    assert reason.startswith("NVGEMM.kernels_X 1.0 requires nvgemm-kernels-x-part2==1.0, and")


def test_several_targets_get_a_wheel_each_before_one_is_split(large: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.nvgemm"
    write_bundle(small, replace(varied_content(), target=Target(arch="sm_100f", cuda="cu12")))
    paths = write(tmp_path / "wheels", encode_wheels([large, small], name="mine", version="1.0"))
    held = []
    for path in paths:
        with ZipFile(path) as archive:
            held += [Path(name).name[:7] for name in archive.namelist() if ".nvgemm" in name]
    assert held == ["sm_100f", "sm_90a-", "sm_90a-", "sm_90a-"]
    first, *others = map(fields, paths)
    assert first["Provides-Extra"] == ["cu12", "cu13"]
    assert all("Provides-Extra" not in part for part in others)
    assert runtime_requirement(__version__, []) in others[0]["Requires-Dist"]


def test_two_targets_that_fit_together_stay_in_one_wheel(tmp_path: Path) -> None:
    paths = [tmp_path / f"{arch}.nvgemm" for arch in ("sm_100f", "sm_90a")]
    for path in paths:
        write_bundle(path, replace(varied_content(), target=Target(arch=path.stem)))
    [wheel] = encode_wheels(paths, name="mine", version="1.0")
    assert (wheel.number, wheel.count) == (1, 1)


def test_parts_that_split_made_get_a_wheel_each(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_set, "MAX_WHEEL_BYTES", 10 << 20)
    words = ["split", str(large), "--parts", "3", "-o", str(tmp_path)]
    assert CliRunner().invoke(main, words).exit_code == 0
    parts = sorted(tmp_path.iterdir())
    wheels = encode_wheels(parts[::-1], name="mine", version="1.0")
    assert [wheel.count for wheel in wheels] == [3, 3, 3]
    held = []
    for path in write(tmp_path / "wheels", wheels):
        with ZipFile(path) as archive:
            held += [archive.read(name) for name in archive.namelist() if ".nvgemm" in name]
    assert held == [part.read_bytes() for part in parts]
    with pytest.raises(PackagingError, match="both for target"):
        encode_wheels([parts[0], parts[0]], name="mine", version="1.0")


def test_confirmations_go_where_their_kernels_are(large: Path, tmp_path: Path) -> None:
    with Bundle(large) as bundle:
        header = bundle.header
        by_signature = {kernel.signature: kernel.id for kernel in header.kernels}
        chosen, problem = next(
            (by_signature[ranking.problem.signature], ranking.problem.key)
            for ranking in header.rankings
        )
    conditions = measurement().conditions
    assert conditions is not None
    timing = Timing(time_ns=100, spread_ns=1)
    file = tmp_path / "a.confirmed.json"
    file.write_bytes(
        encode_confirmations(
            Confirmations(
                gpu=HERE,
                by="test",
                conditions=conditions,
                problems={problem: ConfirmedTimes(kernels={chosen: timing}, aten=timing)},
            )
        )
    )
    wheels = encode_wheels([large], name="mine", version="1.0", confirmed=[file])
    holders = 0
    for path in write(tmp_path / "wheels", wheels):
        with ZipFile(path) as archive:
            names = archive.namelist()
            has_file = any(name.endswith(".confirmed.json") for name in names)
            [inner] = [name for name in names if name.endswith(".nvgemm")]
            (tmp_path / "one.nvgemm").write_bytes(archive.read(inner))
        with Bundle(tmp_path / "one.nvgemm") as bundle:
            has_kernel = chosen in {kernel.id for kernel in bundle.header.kernels}
        assert has_file == has_kernel
        holders += has_file
    assert holders == 1


def test_a_row_that_fits_no_wheel_is_refused(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_set, "MAX_WHEEL_BYTES", 30_000)
    with pytest.raises(PackagingError, match="at most 30000 are allowed, and a row stays together"):
        write_wheel([large], name="mine", version="1.0", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_which_files_belong_together(large: Path, tmp_path: Path) -> None:
    words = ["wheel", str(large), "--name", "mine", "--version", "1.0", "-o", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    files = " ".join(f"{name.replace('-', '_')}-1.0-{TAG}" for name in NAMES)
    assert "nvgemm-kernels-mine is split into 3 wheels" in result.output
    assert f"so upload or copy all: {files}\n" in result.output
    assert CliRunner().invoke(main, words).exit_code == 0  # the same parts may be written again
    stray = tmp_path / f"nvgemm_kernels_mine_part4-1.0-{TAG}"
    stray.touch()
    result = CliRunner().invoke(main, words)
    assert result.exit_code == PackagingError.exit_code
    assert f"{stray} is a part of other wheels" in result.output
    stray.rename(tmp_path / f"nvgemm_kernels_mine_part4-0.9-{TAG}")
    result = CliRunner().invoke(main, words)
    assert result.exit_code == PackagingError.exit_code
    assert "part4-0.9" in result.output
    assert "is another version than 1.0" in result.output


def pip(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", python, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


@pytest.mark.slow
def test_pip_installs_upgrades_and_checks_all_parts(
    wheels: list[EncodedWheel], large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = tmp_path / "house"
    write(house, wheels)
    info = f"nvgemm_aot-{__version__}.dist-info"
    runtime = f"nvgemm_aot-{__version__}-py3-none-any.whl"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: nvgemm-aot\nVersion: {__version__}\n"
            "Provides-Extra: cu13\n"
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    (house / runtime).write_bytes(encode_archive(runtime, files))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    before = set(site.iterdir())

    def installed() -> list[str]:
        return sorted(path.name for path in site.glob("nvgemm_kernels*.dist-info"))

    offline = ("install", "--no-index", "--no-compile", "--find-links", house)
    monkeypatch.setattr(wheel_set, "MAX_WHEEL_BYTES", 10 << 20)
    old = encode_wheels([large], name="mine", version="0.9")
    assert len(old) == 1
    write(house, old)
    assert pip(python, *offline, "nvgemm-kernels-mine==0.9").returncode == 0
    assert installed() == ["nvgemm_kernels_mine-0.9.dist-info"]
    done = pip(python, *offline, "--upgrade", "nvgemm-kernels-mine")
    assert done.returncode == 0, done.stderr
    packages = [name.replace("-", "_") for name in NAMES]
    assert installed() == sorted(f"{name}-1.0.dist-info" for name in packages)
    assert pip(python, "check").returncode == 0
    assert pip(python, "uninstall", "-y", NAMES[1]).returncode == 0
    checked = pip(python, "check")
    assert checked.returncode != 0
    assert "requires nvgemm-kernels-mine-part2, which is not installed" in checked.stdout
    assert pip(python, "uninstall", "-y", "nvgemm-aot", *NAMES).returncode == 0
    assert set(site.iterdir()) == before
