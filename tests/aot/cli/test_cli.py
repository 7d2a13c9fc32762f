"""The command line: what it prints, and which exit code each kind of failure gets."""

from __future__ import annotations

import itertools
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fake_provider import FakeProvider, candidate
from nvgemm_aot.bundle import wheel_set
from nvgemm_aot.cli.main import main
from nvgemm_aot.pipeline import assemble, linker, pipeline
from nvgemm_aot.pipeline.pipeline import BuildResult, BuiltBundle
from nvgemm_aot.providers import BLAME, Enumeration
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime import errors
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.target import CUDA_VERSIONS, PLATFORMS
from synthetic_bundles import install_lost_and_damaged, write_synthetic_bundle

MANIFEST = """
version: 1
name: some
targets: [sm_100f]
gemms:
  - {dtype: bf16, mnk: [[16, 512, 256]]}
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a manifest, a private cache and the fake provider."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pipeline, "default_providers", lambda signatures: (FakeProvider.name,))
    (tmp_path / "some.yaml").write_text(MANIFEST)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_every_error_has_its_own_exit_code() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, NvgemmError)
    ]
    codes = [kind.exit_code for kind in kinds]
    assert len(kinds) > 10
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 2} & set(codes), "left to success, crashes and usage errors"


def test_build_says_what_it_wrote_and_then_that_nothing_changed(directory: Path) -> None:
    first = run("build", "some.yaml", "-o", "out", "--wheel")
    assert first.exit_code == 0, first.output
    assert (
        "some-sm_100f-linux_x86_64-cu13.nvgemm: written, 3 kernels for 1 problem," in first.output
    )
    assert "nvgemm_kernels_some-0.1.0-py3-none-manylinux_2_28_x86_64.whl: written" in first.output
    assert "3 kernels compiled" in first.output
    second = run("build", "some.yaml", "-o", "out")
    assert "up to date" in second.output
    assert "0 kernels compiled" in second.output


@pytest.fixture
def built_for_each_platform(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`build` gives a bundle of each platform and CUDA version, in the folder ``out``."""

    def built(*_: object, **__: object) -> BuildResult:
        bundles = []
        for platform, cuda in itertools.product(PLATFORMS, CUDA_VERSIONS):
            path = Path("out", f"some-{platform}-{cuda}.nvgemm")
            write_synthetic_bundle(path, "sm_90a", platform=platform, cuda=cuda)
            with Bundle(path) as bundle:
                header = bundle.header
            bundles.append(
                BuiltBundle(path=path, header=header, file_bytes=1, up_to_date=False, failures=())
            )
        return BuildResult(bundles=tuple(bundles), compiled=0, unserved=())

    monkeypatch.setattr(pipeline, "build", built)
    (directory / "out").mkdir()


@pytest.mark.usefixtures("built_for_each_platform")
def test_no_wheel_is_written_where_one_of_them_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = wheel_set.encode_wheel, itertools.count()

    def encode_one(*args: Any, **named: Any) -> tuple[str, bytes]:
        if next(calls):
            raise errors.PackagingError("too large")
        return encode(*args, **named)

    monkeypatch.setattr(wheel_set, "encode_wheel", encode_one)
    result = run("build", "some.yaml", "-o", "out", "--wheel", "--json")
    assert result.exit_code == errors.PackagingError.exit_code
    assert not list(Path("out").glob("*.whl"))
    assert next(calls) == 2


@pytest.mark.usefixtures("built_for_each_platform")
def test_bundles_of_each_platform_go_into_a_wheel() -> None:
    result = run("build", "some.yaml", "-o", "out", "--wheel", "--json")
    assert result.exit_code == 0, result.output
    wheels = [Path(one["path"]) for one in json.loads(result.stdout)["wheels"]]
    name = "nvgemm_kernels_some-0.1.0-py3-none-manylinux_2_28"
    assert [one.name for one in wheels] == [f"{name}_x86_64.whl", f"{name}_aarch64.whl"]
    for path, platform in zip(wheels, PLATFORMS):
        with zipfile.ZipFile(path) as archive:
            packed = sorted(Path(one).name for one in archive.namelist() if one.endswith(".nvgemm"))
        assert packed == [f"sm_90a-{platform}-{cuda}.nvgemm" for cuda in sorted(CUDA_VERSIONS)]


@pytest.mark.usefixtures("compiled_here")
def test_a_platform_without_kernels_gets_no_wheel_and_build_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = FakeProvider.enumerate

    def none_for_arm(self: FakeProvider, signature: Signature, target: BuildTarget) -> Enumeration:
        if target.target.platform == "linux_aarch64":
            return Enumeration(absence="it compiles nothing for Arm")
        return offered(self, signature, target)

    monkeypatch.setattr(FakeProvider, "enumerate", none_for_arm)
    targets = "targets: [sm_100f, {arch: sm_90a, platform: linux_aarch64}]"
    Path("some.yaml").write_text(MANIFEST.replace("targets: [sm_100f]", targets))
    result = run("build", "some.yaml", "-o", "out", "--wheel")
    assert result.exit_code == 0, result.output
    wheels = Path("out").glob("nvgemm_kernels_*.whl")
    assert [one.name.rpartition("_2_28_")[2] for one in wheels] == ["x86_64.whl"]
    arm = "\nlinux_aarch64: no wheel: no target of this platform has a kernel; the reasons are"
    assert arm in result.stdout
    assert "it compiles nothing for Arm" in result.stdout.partition(arm)[0]
    document = json.loads(run("build", "some.yaml", "-o", "out", "--wheel", "--json").stdout)
    assert document["platforms_without_wheel"] == ["linux_aarch64"]
    assert "no wheel" not in run("build", "some.yaml", "-o", "out").stdout


def test_shards_compile_into_the_cache_and_a_build_writes_the_bundle(directory: Path) -> None:
    first = run("build", "some.yaml", "-o", "out", "--shard", "1/2")
    assert (first.exit_code, first.stdout) == (
        0,
        "shard 1/2: 2 of 3 kernels, 2 compiled now, 0 failed\n",
    )
    assert not Path("out").exists()
    document = json.loads(run("build", "some.yaml", "--shard", "2/2", "--json").stdout)
    assert document["compiled"] == document["kernels"] == 1
    assert "0 kernels compiled now" in run("build", "some.yaml", "-o", "out").stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--shard", "3/2"), "'3/2' is not a shard such as 2/8"),
        (("--shard", "1/2", "--wheel"), "--shard cannot be combined with --wheel"),
        (("--shard", "1/2", "--dry-run"), "--shard cannot be combined with --wheel"),
    ],
)
def test_a_shard_is_one_of_several_and_makes_no_wheel(
    directory: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    result = run("build", "some.yaml", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_build_says_what_it_left_out_and_whether_that_may_pass(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one fails crash")
    said = run("build", "some.yaml").output
    provider = "of provider 'fake_provider:FakeProvider'"
    assert f"  left out fails {provider}: told to fail\n" in said
    assert (
        f"  left out crash {provider}: the compiler process died by SIGKILL, as when memory is "
        f"short; if it does so again, {BLAME}; the next build tries it again\n" in said
    )
    document = json.loads(run("build", "some.yaml", "--json").stdout)
    [bundle] = document["bundles"]
    assert (document["compiled"], bundle["kernels"]) == (0, 1)
    assert Path(bundle["path"]).stat().st_size == bundle["bytes"]
    transient = {f["operator"]: f["is_transient"] for f in bundle["failures"]}
    assert transient == {"fails": False, "crash": True}


def test_dry_run_prints_the_plan_and_compiles_nothing(directory: Path) -> None:
    result = run("build", "some.yaml", "--dry-run", "--rejections", "why.jsonl")
    assert result.exit_code == 0, result.output
    assert "1 problem, 3 unique kernels (3 to compile), at most about 14.1 kB" in result.output
    assert "--prune keeps fewer" not in result.output
    assert "--prune keeps fewer" in run("build", "some.yaml", "--dry-run", "--prune").output
    assert "mm/tn/bf16xbf16/fp32/bf16/m16n512k256" in result.output
    assert not (directory / "dist").exists()
    rejections = [json.loads(line) for line in Path("why.jsonl").read_text().splitlines()]
    problem = "mm/tn/bf16xbf16/fp32/bf16/m16n512k256"
    assert [(one["problem"], one["operator"], one["reason"]) for one in rejections] == [
        (problem, "old", "it is old")
    ]


def test_rejections_name_the_product_whose_ranking_they_are_missing_from(directory: Path) -> None:
    manifest = MANIFEST.replace("[sm_100f]", "[{arch: sm_90a, devices: [H100, H200]}]")
    Path("some.yaml").write_text(manifest)
    result = run("build", "some.yaml", "--dry-run", "--rejections", "why.jsonl")
    assert result.exit_code == 0, result.output
    rejections = [json.loads(line) for line in Path("why.jsonl").read_text().splitlines()]
    places = [(one["target"], one["device"]) for one in rejections]
    assert places == [("sm_90a-linux_x86_64-cu13", name) for name in ("H100", "H200")]


@pytest.mark.parametrize("option", ["--json", "--dry-run"])
def test_what_a_provider_prints_is_no_part_of_the_result(
    directory: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    enumerate_quietly = FakeProvider.enumerate

    def enumerate_aloud(
        self: FakeProvider, signature: Signature, target: BuildTarget
    ) -> Enumeration:
        print("a banner")  # noqa: T201 - as other packages do
        return enumerate_quietly(self, signature, target)

    monkeypatch.setattr(FakeProvider, "enumerate", enumerate_aloud)
    result = run("build", "some.yaml", "--json", option)
    assert "a banner" in result.stderr
    assert json.loads(result.stdout)


@pytest.fixture
def partly_served(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest for two targets, of which one has had kernels and has none now."""
    two = MANIFEST.replace("[sm_100f]", "[sm_100f, sm_90a]")
    (directory / "some.yaml").write_text(two)
    assert run("build", "some.yaml").exit_code == 0

    def enumerate_for_blackwell(
        self: FakeProvider, signature: Signature, target: BuildTarget
    ) -> Enumeration:
        if target.target.arch == "sm_90a":
            return Enumeration(absence="sm_90a has none")
        return Enumeration(candidates=(candidate("one", signature),))

    monkeypatch.setattr(FakeProvider, "enumerate", enumerate_for_blackwell)
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(directory / "another cache"))


@pytest.mark.usefixtures("compiled_here", "partly_served")
def test_build_says_which_bundle_it_removed() -> None:
    path = "dist/some-sm_90a-linux_x86_64-cu13.nvgemm"
    result = run("build", "some.yaml")
    assert result.exit_code == 0, result.output
    assert f"{path}: removed; an earlier build made it" in result.output
    assert "sm_90a: no kernel for 1 problem: sm_90a has none" in result.output
    Path(path).touch()
    assert json.loads(run("build", "some.yaml", "--json").stdout)["removed"] == [path]
    assert json.loads(run("build", "some.yaml", "--json").stdout)["removed"] == []


@pytest.mark.usefixtures("compiled_here", "partly_served")
def test_a_dry_run_is_as_strict_as_the_build() -> None:
    assert run("build", "some.yaml", "--dry-run").exit_code == 0
    for option in ("--dry-run", "--wheel"):
        result = run("build", "some.yaml", "--strict", option)
        assert result.exit_code == errors.NoCandidateError.exit_code, result.output
        assert "sm_90a has none" in result.stderr


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (None, errors.ManifestError.exit_code, "some.yaml"),
        ("", errors.ManifestError.exit_code, "some.yaml"),
        ("version: [", errors.ManifestError.exit_code, "some.yaml:"),
        (MANIFEST.replace("sm_100f", "sm_77"), errors.ManifestError.exit_code, "sm_77"),
        (MANIFEST.replace("bf16", "fp12"), errors.ManifestError.exit_code, "fp12"),
        (MANIFEST.replace("256", "250"), errors.NoCandidateError.exit_code, "multiple of 8"),
    ],
)
def test_bad_manifests_have_an_exit_code_and_leave_nothing(
    directory: Path, text: str | None, code: int, says: str
) -> None:
    (directory / "some.yaml").unlink()
    if text is not None:
        (directory / "some.yaml").write_text(text)
    result = run("build", "some.yaml")
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert result.stderr.startswith("nvgemm-aot: error: ")
    assert not (directory / "dist").exists()


def test_a_bad_wheel_version_is_found_before_anything_is_compiled(directory: Path) -> None:
    result = run("build", "some.yaml", "--wheel", "--wheel-version", "not a version")
    assert result.exit_code == errors.PackagingError.exit_code
    assert not (directory / "dist").exists()
    assert run("build", "some.yaml", "--wheel-version", "1.0").exit_code == 2
    assert run("build", "some.yaml", "--rejections", "why.jsonl").exit_code == 2


def test_a_shipped_manifest_is_found_by_its_name(directory: Path) -> None:
    result = run("build", "quickstart", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)["targets"]
    assert [target["target"][:6] for target in planned] == ["sm_100", "sm_90a"]
    (directory / "quickstart").write_text(MANIFEST)
    mine = json.loads(run("build", "quickstart", "--dry-run", "--json").stdout)["targets"]
    assert len(mine) == 1, "a file of that name comes first"


def test_verify_goes_on_after_a_file_that_is_no_bundle(directory: Path) -> None:
    write_synthetic_bundle(directory / "x.nvgemm", "sm_90a")
    result = run("verify", "some.yaml", "x.nvgemm", "--no-disassemble", "--json")
    documents = json.loads(result.stdout)
    assert "[magic]" in documents[0]["error"]
    assert documents[1]["kernels"]
    assert result.exit_code == errors.VerificationError.exit_code


def test_no_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (linker.c_compiler, linker.linker_version):
        monkeypatch.setattr(linker, cached.__name__, cached.__wrapped__)
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run("build", "some.yaml")
    assert result.exit_code == errors.ToolchainError.exit_code
    assert "no-such-compiler" in result.stderr


def test_unwritable_cache(directory: Path) -> None:
    (directory / "cache").write_text("in the way")
    result = run("build", "some.yaml")
    assert result.exit_code == errors.StorageError.exit_code
    assert "NVGEMM_AOT_CACHE" in result.stderr
    assert not list((directory / "dist").iterdir())


def test_interrupt_is_reported_as_shells_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(assemble, "compile_all", interrupted)
    result = run("build", "some.yaml")
    assert result.exit_code == 130
    assert "compiled kernels are in the cache" in result.stderr


def test_an_interrupt_inside_a_compiler_process_is_one_of_the_build(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one interrupts")
    result = run("build", "some.yaml", "-j", "1")
    assert result.exit_code == 130
    assert (
        result.stderr.splitlines()[-1]
        == "nvgemm-aot: interrupted; compiled kernels are in the cache"
    )
    assert capfd.readouterr().err == "", "the process prints no traceback"


def test_inspect_shows_header_kernels_and_rankings(directory: Path) -> None:
    write_synthetic_bundle(directory / "x.nvgemm", "sm_90a")
    text = run("inspect", "x.nvgemm").output
    for expected in ("sm_90a-linux_x86_64-cu13", "H200", "128x64x64", "m1024n4096k4096", "4.8.1"):
        assert expected in text
    document = json.loads(run("inspect", "x.nvgemm", "--json").output)
    assert document["kernels"][0]["operator"] == "SyntheticGemm"
    assert document["problems"][0]["kernels"] == [
        {"id": document["kernels"][0]["id"], "time_ns": 1000}
    ]


def test_files_that_cannot_be_used_have_an_exit_code(directory: Path) -> None:
    result = run("inspect", "some.yaml")
    assert result.exit_code == errors.BundleFormatError.exit_code
    assert "[magic]" in result.stderr
    write_synthetic_bundle(directory / "x.nvgemm", "sm_90a")
    twice = run("wheel", "x.nvgemm", "x.nvgemm", "--name", "mine")
    assert twice.exit_code == errors.PackagingError.exit_code


def test_schema_is_json_schema() -> None:
    schema = json.loads(run("schema").output)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {"name", "targets", "gemms"} <= schema["properties"].keys()


def test_list_works_without_any_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvgemm_runtime.installed.discover.find_wheel_bundles", tuple)
    assert "no bundle is installed" in run("list").output
    assert json.loads(run("list", "--json").output) == []


def test_list_says_what_an_installed_wheel_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, damaged = install_lost_and_damaged(tmp_path, monkeypatch)
    text = run("list").output
    assert f"\n{lost} is missing" in text
    assert f"\n{damaged}: distribution nvgemm-kernels-damaged cannot be used" in text
    assert text.count("reinstall") == 2
    rows = json.loads(run("list", "--json").output)
    assert [(one["distribution"], one["path"]) for one in rows] == [
        ("nvgemm-kernels-damaged", str(damaged)),
        ("nvgemm-kernels-lost", str(lost)),
    ]
    assert "it has no RECORD" in rows[0]["error"]
