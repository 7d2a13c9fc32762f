from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
from email.parser import BytesParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import pytest
from packaging.utils import parse_wheel_filename

from nvgemm_aot.bundle import wheel_description
from nvgemm_aot.bundle.wheel import runtime_requirement
from nvgemm_runtime import __version__
from nvgemm_runtime.errors import BundleFormatError, PackagingError, StorageError
from repository import ROOT
from synthetic_bundles import write_synthetic_bundle
from written_wheels import write_wheel

INFO = "nvgemm_kernels_demo-1.0.dist-info"
REPOSITORY = ROOT


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("bundles")
    return [
        write_synthetic_bundle(directory / f"{arch}.nvgemm", arch) for arch in ("sm_90a", "sm_100f")
    ]


@pytest.fixture(scope="module")
def wheel(bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(
        bundles, name="demo", version="1.0", out_dir=tmp_path_factory.mktemp("wheels")
    )


def read(wheel: Path, name: str) -> bytes:
    with ZipFile(wheel) as archive:
        return archive.read(name)


def metadata(wheel: Path, info: str = INFO) -> dict[str, list[str]]:
    message = BytesParser().parsebytes(read(wheel, f"{info}/METADATA"))
    body = message.get_payload(decode=True)
    assert isinstance(body, bytes)
    return {key: message.get_all(key, []) for key in message} | {"body": [body.decode()]}


def test_name_says_distribution_version_and_platform(wheel: Path) -> None:
    assert wheel.name == "nvgemm_kernels_demo-1.0-py3-none-manylinux_2_28_x86_64.whl"
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("nvgemm-kernels-demo", "1.0")
    text = read(wheel, f"{INFO}/WHEEL").decode()
    assert [f"Tag: {tag}" in text for tag in tags] == [True]


def test_holds_each_bundle_by_target_and_nothing_that_runs(
    wheel: Path, bundles: list[Path]
) -> None:
    for path in bundles:
        inner = f"nvgemm_kernels_demo/{path.stem}-linux_x86_64-cu13.nvgemm"
        assert read(wheel, inner) == path.read_bytes()
    code = compile(read(wheel, "nvgemm_kernels_demo/__init__.py"), "__init__.py", "exec")
    assert code.co_names == ("__doc__",)


def test_entry_point_names_the_package(wheel: Path) -> None:
    assert read(wheel, f"{INFO}/entry_points.txt").decode() == (
        "[nvgemm_aot.bundles]\nnvgemm-kernels-demo = nvgemm_kernels_demo\n"
    )


def test_same_bundles_give_same_bytes(
    wheel: Path, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    moved = [tmp_path / f"{index}.nvgemm" for index in range(2)]
    for source, target in zip(bundles, moved):
        target.write_bytes(source.read_bytes())
        os.utime(target, (0, 0))
    umask = os.umask(0o077)
    try:
        again = write_wheel(
            moved[::-1], name="Demo", version="1.0", out_dir=tmp_path / "new" / "directory"
        )
    finally:
        os.umask(umask)
    assert again.read_bytes() == wheel.read_bytes()
    assert os.environ["SOURCE_DATE_EPOCH"] == "1700000000"


def test_entries_are_stored_with_fixed_time_and_mode(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert {entry.compress_type for entry in entries} == {ZIP_STORED}
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert {entry.external_attr >> 16 for entry in entries} == {0o100644}
    assert entries[-1].filename == f"{INFO}/RECORD"


def test_record_lists_every_file_with_its_digest(wheel: Path) -> None:
    rows = list(csv.reader(read(wheel, f"{INFO}/RECORD").decode().splitlines()))
    with ZipFile(wheel) as archive:
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
    assert rows.pop() == [f"{INFO}/RECORD", "", ""]
    for name, digest, size in rows:
        data = read(wheel, name)
        encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={encoded}", len(data))


def test_metadata_says_what_it_is_and_needs(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["Metadata-Version"] == ["2.4"]
    assert fields["Name"] == ["nvgemm-kernels-demo"]
    assert fields["Version"] == ["1.0"]
    assert fields["Requires-Python"] == [">=3.10"]
    assert fields["Requires-Dist"] == [runtime_requirement(__version__, ["cu13"])]
    assert fields.get("Provides-Extra", []) == []
    assert fields["License-Expression"] == ["Apache-2.0 AND BSD-3-Clause"]
    (body,) = fields["body"]
    for text in (
        "pip install nvgemm_aot-*.whl nvgemm_kernels_demo-*.whl\n",
        "| `sm_100f-linux_x86_64-cu13` | H200 | 1 | 2 | estimate of a / model 1.0 for NVIDIA ",
        "| `mm/tn/bf16xbf16/fp32/bf16` | 4096 | 4096 | 1 | 16, 1024 | sm_100f, sm_90a |",
        "| nvidia-cutlass-dsl | 4.8.1 |",
    ):
        assert text in body


def test_description_of_many_problems_says_how_many_it_leaves_out(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_description, "MAX_PROBLEM_ROWS", 0)
    path = write_wheel(bundles, name="demo", version="1.0", out_dir=tmp_path)
    assert "… and 1 more row." in metadata(path)["body"][0]


def test_summary_can_be_given(bundles: list[Path], tmp_path: Path) -> None:
    path = write_wheel(
        bundles, name="demo", version="1", out_dir=tmp_path, summary="For my\n model\n"
    )
    assert metadata(path, "nvgemm_kernels_demo-1.dist-info")["Summary"] == ["For my model"]


@pytest.mark.parametrize(
    ("installed", "required"),
    [
        ("0.1.0", "nvgemm-aot>=0.1.0,<0.2"),
        ("0.2.0.dev3+local", "nvgemm-aot>=0.2.0.dev3,<0.3"),
        ("1.4.2", "nvgemm-aot>=1.4.2,<2"),
    ],
)
def test_requires_this_runtime_or_a_later_compatible_one(installed: str, required: str) -> None:
    assert runtime_requirement(installed, []) == required
    named = runtime_requirement(installed, ["cu12"])
    assert named == required.replace("nvgemm-aot", "nvgemm-aot[cu12]")


def test_bundles_of_two_cuda_versions_have_an_extra_each(
    bundles: list[Path], tmp_path: Path
) -> None:
    other = write_synthetic_bundle(tmp_path / "in" / "b.nvgemm", "sm_90a", cuda="cu12")
    alone = write_wheel([other], name="alone", version="1", out_dir=tmp_path)
    only = metadata(alone, "nvgemm_kernels_alone-1.dist-info")["Requires-Dist"]
    assert only == [runtime_requirement(__version__, ["cu12"])]
    path = write_wheel([*bundles, other], name="demo", version="1.0", out_dir=tmp_path)
    fields = metadata(path)
    assert fields["Provides-Extra"] == ["cu12", "cu13"]
    assert fields["Requires-Dist"] == [
        runtime_requirement(__version__, []),
        *(
            f'{runtime_requirement(__version__, [cuda])}; extra == "{cuda}"'
            for cuda in ("cu12", "cu13")
        ),
    ]
    (body,) = fields["body"]
    wheels = 'nvgemm_aot-*.whl "$(echo ./nvgemm_kernels_demo-*.whl)'
    for cuda in ("12", "13"):
        assert f'pip install {wheels}[cu{cuda}]"  # beside a torch for CUDA {cuda}\n' in body


def test_bundles_for_arm_get_its_tag(tmp_path: Path) -> None:
    bundle = write_synthetic_bundle(tmp_path / "b.nvgemm", "sm_90a", platform="linux_aarch64")
    path = write_wheel([bundle], name="demo", version="1", out_dir=tmp_path)
    assert path.name == "nvgemm_kernels_demo-1-py3-none-manylinux_2_28_aarch64.whl"


def test_licence_files_are_those_that_the_metadata_names(wheel: Path) -> None:
    names = metadata(wheel)["License-File"]
    assert names == ["Apache-2.0.txt", "BSD-3-Clause.txt"]
    apache, bsd = (read(wheel, f"{INFO}/licenses/{name}") for name in names)
    assert apache == (REPOSITORY / "LICENSE").read_bytes()
    assert b"SPDX-License-Identifier: BSD-3-Clause" in bsd


def test_bsd_text_is_the_one_of_the_operator_sources() -> None:
    try:
        operators = distribution("nvidia-cutlass-operators")
    except PackageNotFoundError:
        pytest.skip("nvidia-cutlass-operators is not installed")
    texts = [f.read_text() for f in operators.files or () if f.match("licenses/LICENSE.txt")]
    assert texts == [wheel_description.read_template("licenses/BSD-3-Clause.txt")]


def test_sbom_gives_bundles_toolchain_and_runtime(wheel: Path, bundles: list[Path]) -> None:
    sbom = json.loads(read(wheel, f"{INFO}/sboms/nvgemm-kernels-demo.cdx.json"))
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert "serialNumber" not in sbom
    assert "timestamp" not in sbom["metadata"]
    root = sbom["metadata"]["component"]
    assert root["purl"] == "pkg:pypi/nvgemm-kernels-demo@1.0"
    files = {item["name"]: item for item in sbom["components"] if item["type"] == "file"}
    for path in bundles:
        target = f"{path.stem}-linux_x86_64-cu13"
        item = files[f"nvgemm_kernels_demo/{target}.nvgemm"]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert item["hashes"] == [{"alg": "SHA-256", "content": digest}]
        assert {"name": "nvgemm:target", "value": target} in item["properties"]
    purls = {item["purl"]: item["scope"] for item in sbom["components"] if "purl" in item}
    assert purls == {
        "pkg:pypi/nvgemm-aot": "required",
        "pkg:pypi/nvidia-cutlass-dsl@4.8.1": "excluded",
        "pkg:pypi/apache-tvm-ffi@0.1.15.post2": "excluded",
        "pkg:generic/ld@2.40": "excluded",
    }
    references = [item["bom-ref"] for item in sbom["components"]]
    assert len(set(references)) == len(references)
    named = {ref for item in sbom["dependencies"] for ref in (item["ref"], *item["dependsOn"])}
    assert named == {root["bom-ref"], *references}


@pytest.mark.slow
def test_sbom_keeps_the_published_schema(wheel: Path) -> None:
    pytest.importorskip("jsonschema", reason="cyclonedx-python-lib[json-validation] is absent")
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    text = read(wheel, f"{INFO}/sboms/nvgemm-kernels-demo.cdx.json").decode()
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(text) is None


@pytest.mark.parametrize(
    "command", [["twine", "check", "--strict"], ["check_wheel_contents"]], ids=lambda c: c[0]
)
def test_public_checkers_accept_it(wheel: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, str(wheel)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def refuse(bundles: list[Path], out_dir: Path, message: str, **change: str) -> None:
    """Expect a PackagingError with ``message``, and no trace of a wheel."""
    arguments = {"name": "demo", "version": "1.0", **change}
    with pytest.raises(PackagingError, match=message):
        write_wheel(bundles, out_dir=out_dir, **arguments)
    assert list(out_dir.iterdir()) == []


def test_refuses_no_bundles(tmp_path: Path) -> None:
    refuse([], tmp_path, r"at least one bundle \(got 0\)")


def test_refuses_two_bundles_of_one_target(bundles: list[Path], tmp_path: Path) -> None:
    refuse([bundles[0], bundles[0]], tmp_path, "both for target sm_90a-linux_x86_64-cu13")


def test_refuses_bundles_of_several_platforms(bundles: list[Path], tmp_path: Path) -> None:
    other = write_synthetic_bundle(tmp_path / "in" / "b.nvgemm", "sm_90a", platform="linux_aarch64")
    (tmp_path / "out").mkdir()
    refuse([bundles[0], other], tmp_path / "out", "linux_aarch64, linux_x86_64")
    odd = write_synthetic_bundle(tmp_path / "in" / "c.nvgemm", "sm_90a", platform="linux_riscv64")
    refuse([odd], tmp_path / "out", "no wheel tag for platform 'linux_riscv64'")


@pytest.mark.parametrize("name", ["", "-a", "a-", "a b", "a/b", "ä", "../x", "a\n"])
def test_refuses_invalid_name(bundles: list[Path], tmp_path: Path, name: str) -> None:
    refuse(bundles, tmp_path, "wheel name .* is not valid", name=name)


@pytest.mark.parametrize("version", ["", "latest", "1.0-beta-x", "1/0"])
def test_refuses_invalid_version(bundles: list[Path], tmp_path: Path, version: str) -> None:
    refuse(bundles, tmp_path, "is not a Python package version", version=version)


@pytest.mark.parametrize(
    "summary", ["", " \n", "bell\a", "long" * 129], ids=["empty", "blank", "control", "long"]
)
def test_refuses_summary_that_an_index_refuses(
    bundles: list[Path], tmp_path: Path, summary: str
) -> None:
    refuse(bundles, tmp_path, "summary must be 1 to 512 printable", summary=summary)


def test_damaged_bundle_passes_through(bundles: list[Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.nvgemm"
    damaged.write_bytes(bundles[0].read_bytes()[:-1] + b"!")
    with pytest.raises(BundleFormatError, match="body-digest"):
        write_wheel([damaged], name="demo", version="1.0", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_failed_write_keeps_the_previous_wheel(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = write_wheel(bundles[:1], name="demo", version="1.0", out_dir=tmp_path)
    before = previous.read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match="No space left"):
        write_wheel(bundles, name="demo", version="1.0", out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [previous]
    assert previous.read_bytes() == before
