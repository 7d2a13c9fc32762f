"""The command ``nvgemm-aot coverage``: where bundles come from, what is written, exit codes."""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_aot.workload import find_bundles
from nvgemm_runtime import errors
from nvgemm_runtime.bundle.format import FORMAT_VERSION, MAGIC, MAX_HEADER_BYTES, PREFIX
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.recording.text import Recording
from recorded_gemms import OTHER_TYPE, RECORDING, RECORDING_TEXT, content, write
from repository import ROOT
from written_wheels import write_wheel


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recording and a bundle of half of it; nothing is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    monkeypatch.setattr("nvgemm_runtime.installed.discover.find_wheel_bundles", tuple)
    monkeypatch.setattr(find_bundles, "INSTALLATION", Installation())
    (tmp_path / "recorded.yaml").write_text(RECORDING_TEXT)
    (tmp_path / "dist").mkdir()
    write(tmp_path / "dist/half.nvgemm", content())
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("coverage", "recorded.yaml", *arguments))


def covered(*arguments: str) -> dict[str, float]:
    """Percentages by count, by architecture."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return {
        target["target"].split("-")[0]: target["percent"]["count"]["covered"]
        for target in json.loads(result.stdout)["targets"]
    }


def test_bundles_are_files_directories_and_wheels(directory: Path) -> None:
    for path in ("dist/half.nvgemm", "dist"):
        assert covered(path) == {"sm_100f": 50.0}
    wheel = write_wheel([Path("dist/half.nvgemm")], name="half", version="1.0", out_dir=directory)
    other = write(directory / "other.nvgemm", content(OTHER_TYPE))
    assert covered(wheel.name, other.name) == {"sm_100f": 100.0}
    [bundle] = json.loads(run(wheel.name, "--json").stdout)["targets"][0]["bundles"]
    assert bundle.startswith(f"{wheel.name}/nvgemm_kernels_half/")


def test_without_bundles_the_installed_ones_count(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert covered() == {"sm_100f": 0.0}
    assert "no bundle is installed" in run().stdout
    (directory / "dist/broken.nvgemm").write_bytes(b"no bundle")
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(directory / "dist"))
    monkeypatch.setattr(find_bundles, "INSTALLATION", Installation())
    assert covered() == {"sm_100f": 50.0}
    assert "broken.nvgemm: [truncated]" in run().stdout, "as in a process: left out, and said"


def test_other_targets_can_be_asked_for(directory: Path) -> None:
    assert covered("dist", "--target", "sm_90a", "--target", "sm_103a") == {
        "sm_103a": 50.0,  # a family's kernels run there too
        "sm_90a": 0.0,
    }
    assert run("dist", "--target", "sm_77").exit_code == 2


def looked_at(*arguments: str) -> list[str]:
    """Targets of the answer, and their devices."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    targets = json.loads(result.stdout)["targets"]
    return [f"{target['target']} {target['device']}" for target in targets]


def test_a_target_has_the_platforms_and_cuda_versions_of_the_manifest_unless_named(
    directory: Path,
) -> None:
    declared = "[{arch: sm_100f, platform: linux_aarch64}, {arch: sm_100f, cuda: cu12}]"
    text = RECORDING_TEXT.replace("[sm_100f]", declared)
    (directory / "recorded.yaml").write_text(text)
    assert looked_at() == [
        "sm_100f-linux_aarch64-cu13 GB200",
        "sm_100f-linux_x86_64-cu12 B200",
    ]
    assert looked_at("--target", "sm_90a") == [
        "sm_90a-linux_aarch64-cu13 H200",
        "sm_90a-linux_x86_64-cu12 H200",
        "sm_90a-linux_x86_64-cu12 H100",
    ]
    assert looked_at("--target", "sm_100f-linux_aarch64-cu12") == [
        "sm_100f-linux_aarch64-cu12 GB200"
    ]
    assert looked_at("--target", "sm_90a-cu12", "--target", "sm_90a-linux_x86_64") == [
        "sm_90a-linux_aarch64-cu12 H200",
        "sm_90a-linux_x86_64-cu12 H200",
        "sm_90a-linux_x86_64-cu12 H100",
        "sm_90a-linux_x86_64-cu13 H200",
        "sm_90a-linux_x86_64-cu13 H100",
    ]


def test_kernels_of_another_platform_are_missed_with_the_reason(directory: Path) -> None:
    result = run("dist", "--target", "sm_100f-linux_aarch64-cu13", "--fail-under", "10")
    assert result.exit_code == 23
    assert "built for platform linux_x86_64, this is linux_aarch64" in result.stdout
    assert "targets: [{arch: sm_100f, platform: linux_aarch64}]" in result.stderr


def test_a_target_that_is_none_is_refused_with_those_that_are_allowed(directory: Path) -> None:
    result = run("dist", "--target", "sm_90a-linux-cu13")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "no provider builds for 'sm_90a-linux-cu13'; allowed: sm_90a, sm_100a, " in said


def test_fail_under_decides_the_exit_status(directory: Path) -> None:
    assert run("dist", "--fail-under", "50").exit_code == 0
    assert run("dist", "--fail-under", "55.5", "--by", "flops").exit_code == 0
    assert run("dist", "--fail-under", "66.6", "--by", "problems").exit_code == 0
    assert run("dist", "--fail-under", "37.5", "--declared-only").exit_code == 0
    for arguments in (
        ["--fail-under", "50.1"],
        ["--fail-under", "55.6", "--by", "flops"],
        ["--fail-under", "66.7", "--by", "problems"],
        ["--fail-under", "37.6", "--declared-only"],
    ):
        result = run("dist", *arguments)
        assert result.exit_code == errors.CoverageError.exit_code == 23
        assert result.stderr.startswith("nvgemm-aot: error: sm_100f-linux_x86_64-cu13 on B200: ")
        assert OTHER_TYPE.key in result.stdout, "the table is printed all the same"
    result = run("dist", "--fail-under", "100", "--json")
    assert result.exit_code == errors.CoverageError.exit_code
    assert len(json.loads(result.stdout)["targets"][0]["gemms"]) == 3, "it is whole all the same"
    assert "dtype: fp16" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--fail-under", percent) for percent in ("101", "-1", "nan", "most")),
        ("--declared-only",),
        ("--by", "time"),
    ],
)
def test_wrong_usage(directory: Path, arguments: tuple[str, ...]) -> None:
    assert run("dist", *arguments).exit_code == 2


def test_the_page_is_written_whole(directory: Path) -> None:
    result = run("dist", "--html", "pages/coverage.html", "--fail-under", "100")
    assert result.exit_code == errors.CoverageError.exit_code
    text = Path("pages/coverage.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.endswith("</html>\n")
    assert [path.name for path in Path("pages").iterdir()] == ["coverage.html"]
    failed = run("dist", "--html", "dist")
    assert failed.exit_code == errors.StorageError.exit_code
    assert "dist: cannot write" in failed.stderr


def wheel_of(path: Path, name: str, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"package/{name}", data)


def broken_wheel(path: Path) -> None:
    wheel_of(path, "broken.nvgemm", b"no bundle")


def damaged_wheel(path: Path) -> None:
    broken_wheel(path)
    path.write_bytes(path.read_bytes().replace(b"no bundle", b"NO BUNDLE"))


def wheel_of_nothing(path: Path) -> None:
    wheel_of(path, "__init__.py", b"")


def text_file(path: Path) -> None:
    path.write_text("no bundle" * 99)


def nothing(_: Path) -> None:
    pass


FORMAT, STORAGE = errors.BundleFormatError, errors.StorageError


@pytest.mark.parametrize(
    ("name", "make", "kind", "says"),
    [
        ("x.nvgemm", Path.touch, FORMAT, "x.nvgemm: [truncated]"),
        ("x.nvgemm", text_file, FORMAT, "x.nvgemm: [magic]"),
        ("x.nvgemm", nothing, STORAGE, "cannot open"),
        ("x", Path.mkdir, STORAGE, "holds no .nvgemm file"),
        ("x.whl", nothing, STORAGE, "No such file"),
        ("x.whl", text_file, STORAGE, "incomplete wheel"),
        ("x.whl", damaged_wheel, STORAGE, "incomplete wheel"),
        ("x.whl", wheel_of_nothing, STORAGE, "holds no .nvgemm file"),
        ("x.whl", broken_wheel, FORMAT, "x.whl/package/broken.nvgemm: [truncated]"),
    ],
)
def test_a_bundle_that_is_named_must_be_one(
    directory: Path,
    name: str,
    make: Callable[[Path], None],
    kind: type[errors.NvgemmError],
    says: str,
) -> None:
    make(directory / name)
    result = run("dist", name)
    assert result.exit_code == kind.exit_code, result.output
    assert says in result.stderr
    assert result.stderr.startswith(f"nvgemm-aot: error: {name}")
    assert result.stdout == ""


def test_what_a_recording_could_not_declare_is_said_or_missed(directory: Path) -> None:
    words = "addmm of fp32[16, 64] and fp32[64, 32] into fp32[16, 32]"
    recorded = Recording(
        name="recorded",
        targets={"sm_100f"},
        problems=Counter({one.problem: one.count for one in RECORDING.declared}),
        undeclarable=Counter({f"{words}: no bundled kernel adds a bias: really": 2}),
    )
    path = directory / "recorded.yaml"
    path.write_text(recorded.render())
    assert covered("dist") == {"sm_100f": 50.0}
    assert (
        f"not counted: 2 GEMMs that no manifest can declare, such as {words}" in run("dist").stderr
    )
    assert covered("dist", "--count-undeclarable") == {"sm_100f": 40.0}
    [target] = json.loads(run("dist", "--json", "--count-undeclarable").stdout)["targets"]
    [shown] = (gemm for gemm in target["gemms"] if gemm["gemm"] == words)
    assert (shown["status"], shown["count"], shown["flops"]) == ("missed", 2, 4 * 16 * 64 * 32)
    assert shown["reasons"] == ["no bundled kernel adds a bias: really"]
    path.write_text(path.read_text() + "# edited by hand\n")
    assert covered("dist", "--count-undeclarable") == {"sm_100f": 40.0}
    path.write_text("# 9 x faster: a comment like theirs\n" + RECORDING_TEXT)
    assert covered("dist", "--count-undeclarable") == {"sm_100f": 50.0}


def test_the_example_of_the_documentation_is_what_is_printed(directory: Path) -> None:
    document = (ROOT / "docs/guide/ci.md").read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    yaml, printed, complaint = (block for kind, block in fenced if kind != "sh")
    [command] = re.findall(r"`nvgemm-aot coverage (recorded\.yaml dist/.*)` prints", document)
    (directory / "recorded.yaml").write_text(yaml)
    quickstart = load_manifest(find_manifest(Path("quickstart"))).declared
    bundle = content(*(one.problem for one in quickstart), arch="sm_90a")
    write(directory / command.split()[1], bundle)
    result = run(*command.split()[1:])
    assert result.stdout == printed
    assert result.stderr == complaint


def test_of_a_wheel_no_more_than_headers_is_unpacked(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is packed behind them, and however large it would be."""
    unpacked = 0
    read_really = zipfile.ZipExtFile.read

    def read(self: zipfile.ZipExtFile, n: int | None = -1) -> bytes:
        nonlocal unpacked
        data = read_really(self, n)
        unpacked += len(data)
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)
    zeros = bytes(1 << 20)
    with (
        zipfile.ZipFile("bomb.whl", "w", zipfile.ZIP_DEFLATED) as wheel,
        wheel.open("package/zeros.nvgemm", "w") as member,
    ):
        for _ in range(64):
            member.write(zeros)
    result = run("bomb.whl")
    assert result.exit_code == FORMAT.exit_code
    assert "bomb.whl/package/zeros.nvgemm: [magic]" in result.stderr
    assert unpacked <= PREFIX.size

    whole = Path("dist/half.nvgemm").read_bytes()
    _, _, header_bytes, _ = PREFIX.unpack(whole[: PREFIX.size])
    wheel_of(Path("whole.whl"), "half.nvgemm", whole)
    unpacked = 0
    assert covered("whole.whl") == {"sm_100f": 50.0}
    assert unpacked == PREFIX.size + header_bytes < len(whole)


def test_a_header_that_claims_too_much_is_not_unpacked(directory: Path) -> None:
    claims = PREFIX.pack(MAGIC, FORMAT_VERSION, MAX_HEADER_BYTES + 1, bytes(32))
    wheel_of(Path("claims.whl"), "claims.nvgemm", claims + bytes(100))
    result = run("claims.whl")
    assert result.exit_code == FORMAT.exit_code
    assert "claims.whl/package/claims.nvgemm: [header-size]" in result.stderr
