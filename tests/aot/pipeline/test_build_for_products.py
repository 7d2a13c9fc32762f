"""One bundle for several GPU products: its kernels once, and a ranking for each product."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fake_provider import SOURCE, FakeProvider, candidate
from made_rankings import entry, rankings
from nvgemm_aot.cli.bundle_texts import bundle_document, bundle_text
from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.pipeline import linker
from nvgemm_aot.pipeline.pipeline import BuildResult, build, plan_build, without_operator
from nvgemm_aot.pipeline.unserved import require_served
from nvgemm_aot.providers import Candidate, Enumeration
from nvgemm_aot.rankings.entries import Rankings
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget, build_target, build_targets
from nvgemm_aot.targets.profile import DeviceProfile, Fact
from nvgemm_aot.verify.bundle import verify_bundle
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import CompileError, NoCandidateError, RankingsError
from nvgemm_runtime.gemm.problem import Problem, Signature

pytestmark = pytest.mark.usefixtures("compiled_here")

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
PROBLEMS = tuple(Problem(signature=SIGNATURE, m=m, n=512, k=256) for m in (1, 16))
H200, H100 = (build_target("sm_90a", name) for name in ("H200", "H100"))


class WithLimits(FakeProvider):
    """Kernels that the number of active clusters is compiled in to."""

    name = "test_build_for_products:WithLimits"

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        found = super().enumerate(signature, target)
        return replace(
            found,
            candidates=tuple(
                replace(
                    one,
                    provider=self.name,
                    cluster_sizes=(2,),
                    design=replace(one.design, cluster=(2, 1), scheduler="static_persistent"),
                    block_shape=replace(one.block_shape, cluster=(2, 1)),
                )
                for one in found.candidates
            ),
        )

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        number = target.device.cluster_capacity(2).value + 1000 * len(candidate.operator)
        return _object_of(SOURCE.format(number=number))


class OnlyOnH200(FakeProvider):
    """Operators for one product alone."""

    name = "test_build_for_products:OnlyOnH200"

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        if target.device.name != "H200":
            return Enumeration(candidates=(), rejections=(), absence="not for this product")
        one = candidate("one", signature)
        return Enumeration(candidates=(replace(one, provider=self.name),), rejections=())


def _object_of(source: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "kernel.c").write_text(source)
        subprocess.run(
            [*linker.c_compiler(), "-c", "-O1", "-fPIC", "-o", "kernel.o", "kernel.c"],
            cwd=directory,
            check=True,
        )
        return (Path(directory) / "kernel.o").read_bytes()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def manifest(*targets: BuildTarget) -> Manifest:
    return Manifest(
        name="some",
        description="",
        targets=targets,
        declared=tuple(Declared(problem=one, candidates=8) for one in PROBLEMS),
    )


def run(
    tmp_path: Path,
    cache: Cache,
    *targets: BuildTarget,
    provider: FakeProvider | None = None,
    given: Rankings | None = None,
    **how: bool,
) -> BuildResult:
    return build(
        manifest(*targets),
        tmp_path / "out",
        cache,
        jobs=1,
        provider=provider or FakeProvider(),
        rankings=given,
        **how,
    )


def header_of(result: BuildResult) -> Header:
    (built,) = result.bundles
    with Bundle(built.path) as bundle:
        bundle.check_body()
        assert bundle.header == built.header
        return bundle.header


def operators(header: Header, gpu: str) -> list[list[str]]:
    return [
        [header.kernels[place.kernel].operator for place in ranking.kernels]
        for ranking in header.rankings_on(gpu)
    ]


def with_capacity(target: BuildTarget, driver_name: str, value: int, basis: str) -> BuildTarget:
    """A target whose device is another product with another number of clusters of 2."""
    limits = {**target.device.max_active_clusters, 2: Fact(value=value, basis=basis, source="x")}
    device: DeviceProfile = replace(
        target.device, name="X", driver_name=driver_name, max_active_clusters=limits
    )
    return replace(target, device=device)


def test_kernels_are_in_the_bundle_once_and_ranked_for_each_product(
    tmp_path: Path, cache: Cache
) -> None:
    result = run(tmp_path, cache, H200, H100)
    header = header_of(result)
    assert (result.compiled, len(header.kernels)) == (3, 3)
    assert header.devices == ("H200", "H100")
    assert header.products == ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    assert [one.problem for one in header.rankings] == [p for p in PROBLEMS for _ in range(2)]
    for gpu in header.products:
        assert {header.gpu_of(one) for one in header.rankings_on(gpu)} == {gpu}
    times = [[place.time_ns for place in one.kernels] for one in header.rankings]
    assert times[0] != times[1], "each is estimated with its own product's numbers"
    again = run(tmp_path, cache, H200, H100)
    assert again.bundles[0].up_to_date


def test_the_first_products_rankings_are_those_of_a_bundle_for_it_alone(
    tmp_path: Path, cache: Cache
) -> None:
    alone = header_of(run(tmp_path / "alone", cache, H200))
    both = header_of(run(tmp_path / "both", cache, H200, H100))
    assert alone.further_devices == ()
    assert [one.product for one in alone.rankings] == [None, None]
    assert both.build_key != alone.build_key
    first = [one for one in both.rankings if not one.is_further]
    assert [one.kernels for one in first] == [one.kernels for one in alone.rankings]


def test_the_basis_of_a_shared_number_is_one_that_holds_for_all_products(
    tmp_path: Path, cache: Cache
) -> None:
    provider = WithLimits()
    alone = header_of(run(tmp_path / "alone", cache, H200, provider=provider))
    both = header_of(run(tmp_path / "both", cache, H200, H100, provider=provider))
    assert [one.id for one in both.kernels] == [one.id for one in alone.kernels]
    assert {one.basis for k in alone.kernels for one in k.design.cluster_limits} == {"measured"}
    assert {one.basis for k in both.kernels for one in k.design.cluster_limits} == {"reported"}


def test_products_with_other_numbers_have_kernels_of_their_own(
    tmp_path: Path, cache: Cache
) -> None:
    other = with_capacity(H200, "NVIDIA Other", 39, "estimated")
    result = run(tmp_path, cache, H200, other, provider=WithLimits())
    header = header_of(result)
    for gpu, number, basis in (("NVIDIA H200", 66, "measured"), ("NVIDIA Other", 39, "estimated")):
        used = [
            header.kernels[place.kernel]
            for ranking in header.rankings_on(gpu)
            for place in ranking.kernels
        ]
        limits = {(one.max_active, one.basis) for k in used for one in k.design.cluster_limits}
        assert limits == {(number, basis)}
    names = [kernel.operator for kernel in header.kernels]
    assert sorted(names) == sorted([*{*names}] * 2)


def test_each_product_is_ranked_by_what_was_measured_on_it(tmp_path: Path, cache: Cache) -> None:
    times = {"NVIDIA H200": {"one": 1000, "two": 2000}, "NVIDIA H100 80GB HBM3": {"three": 1500}}
    facts = {"provider": FakeProvider.name, "toolchain": {"fake": "1"}, "arch": "sm_90a"}
    given = rankings(
        *(
            entry(kernels, problem=PROBLEMS[0], product=gpu, **facts)
            for gpu, kernels in times.items()
        ),
    )
    result = run(tmp_path, cache, H200, H100, given=given, strict=True)
    header = header_of(result)
    for gpu, kernels in times.items():
        assert operators(header, gpu)[0] == [*kernels]
        first, second = header.rankings_on(gpu)
        assert (first.measured is None, second.measured is None) == (False, True)
    assert [(one.device, dict(one.standings), one.notes) for one in result.measured] == [
        ("H200", {PROBLEMS[0]: "measured once"}, ()),
        ("H100", {PROBLEMS[0]: "measured once"}, ()),
    ]


def test_what_was_measured_on_neither_product_is_named(tmp_path: Path, cache: Cache) -> None:
    given = rankings(entry({"one": 1000}, problem=PROBLEMS[0], arch="sm_90a", product="NVIDIA H20"))
    with pytest.raises(RankingsError, match="taken on NVIDIA H20, not used for sm_90a on"):
        run(tmp_path, cache, H200, H100, given=given, strict=True)


def test_pruning_keeps_what_wins_on_any_product(tmp_path: Path, cache: Cache) -> None:
    facts = {"provider": FakeProvider.name, "toolchain": {"fake": "1"}, "arch": "sm_90a"}
    given = rankings(
        *(
            entry(times, problem=one, product=gpu, aten=5000, **facts)
            for one in PROBLEMS
            for gpu, times in (
                ("NVIDIA H200", {"one": 1000, "two": 2000, "three": 3000}),
                ("NVIDIA H100 80GB HBM3", {"three": 1000, "two": 2000, "one": 3000}),
            )
        )
    )
    header = header_of(run(tmp_path, cache, H200, H100, given=given, prunes=True))
    assert sorted(kernel.operator for kernel in header.kernels) == ["one", "three"]
    assert operators(header, "NVIDIA H200") == [["one", "three"]] * 2
    assert operators(header, "NVIDIA H100 80GB HBM3") == [["three", "one"]] * 2


def test_a_problem_that_one_product_has_no_operator_for_is_built_for_the_other_and_reported(
    tmp_path: Path, cache: Cache
) -> None:
    provider = OnlyOnH200()
    result = run(tmp_path, cache, H100, H200, provider=provider)
    header = header_of(result)
    assert header.unserved == {}
    assert header.products == ("NVIDIA H200",)
    assert [(one.device, one.problem, one.reason) for one in result.unserved] == [
        ("H100", problem, "not for this product") for problem in PROBLEMS
    ]
    require_served(result.unserved, 1)
    with pytest.raises(NoCandidateError, match=r"sm_90a on H100: .*not for this product"):
        run(tmp_path / "strict", cache, H100, H200, provider=provider, strict=True)


def test_a_problem_without_an_operator_for_any_product_is_reported_once(cache: Cache) -> None:
    planned = plan_build(manifest(H100, H100), cache, provider=OnlyOnH200())
    assert [(one.device, one.problem) for one in without_operator(planned)] == [
        (None, problem) for problem in PROBLEMS
    ]


def test_a_kernel_that_does_not_compile_is_missing_for_each_product(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", "one fail")
    result = run(tmp_path, cache, H200, H100)
    header = header_of(result)
    assert [one.operator for one in header.failures] == ["fail"]
    assert {one.missing for one in header.rankings} == {(0,)}
    assert len(result.bundles[0].failures) == 1
    monkeypatch.setenv("FAKE_OPERATORS", "fail")
    with pytest.raises(CompileError, match="no kernel for 2 problems"):
        run(tmp_path / "none", Cache(tmp_path / "other"), H200, H100)


def test_inspect_and_verify_know_all_products(tmp_path: Path, cache: Cache) -> None:
    path = run(tmp_path, cache, H200, H100).bundles[0].path
    with Bundle(path) as bundle:
        document = bundle_document(bundle)
    assert document["devices"] == ["H200", "H100"]
    gpus = ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    assert [one["gpu"] for one in document["problems"]] == gpus * 2
    assert [one["further"] for one in document["problems"]] == [False, True] * 2
    text = bundle_text(document)
    assert re.search(r"^device profile +H200, H100$", text, re.MULTILINE)
    assert re.search(r"^ranked for +NVIDIA H200, NVIDIA H100 80GB HBM3$", text, re.MULTILINE)
    assert len(re.findall(r"NVIDIA H100 80GB HBM3 +1 ", text)) == 2, "the product is a column"
    report = verify_bundle(path, disassemble=False)
    assert report.device == "H200, H100"


def test_a_wheel_names_the_products(tmp_path: Path, cache: Cache) -> None:
    path = run(tmp_path, cache, H200, H100).bundles[0].path
    result = CliRunner().invoke(main, ["wheel", str(path), "--name", "x", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (wheel,) = tmp_path.glob("nvgemm_kernels_x-*.whl")
    assert wheel.name == "nvgemm_kernels_x-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    data = wheel.read_bytes().decode("utf-8", errors="replace")
    assert "Summary: Ahead-of-time compiled GEMM kernels for sm_90a (H200, H100)" in data
    assert "| `sm_90a-linux_x86_64-cu13` | H200, H100 | 3 | 2 |" in data
    assert '"value": "H200, H100"' in data


def test_a_dry_run_shows_the_ranking_for_each_product(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(
        "version: 1\nname: some\ntargets: [{arch: sm_90a, devices: [H100, H200]}]\n"
        "providers: ['fake_provider:FakeProvider']\n"
        "gemms: [{dtype: bf16, mnk: [[16, 512, 256]]}]\n"
    )
    command = ["build", str(path), "--dry-run", "--cache-dir", str(tmp_path / "cache")]
    text = CliRunner().invoke(main, command).stdout
    assert "sm_90a-linux_x86_64-cu13 (device H100)\n" in text
    assert "sm_90a-linux_x86_64-cu13 (device H200)\n" in text
    assert "sm_90a-linux_x86_64-cu13: 1 problem, 3 unique kernels (3 to compile)" in text
    (target,) = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)["targets"]
    assert [one["gpu"] for one in target["products"]] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert [len(one["problems"]) for one in target["products"]] == [1, 1]


def test_a_target_that_names_no_device_is_for_every_product_of_its_own_capability() -> None:
    def names(arch: str, platform: str) -> list[str]:
        return [one.device.name for one in build_targets(arch, platform=platform)]

    assert names("sm_90a", "linux_x86_64") == ["H200", "H100"]
    assert names("sm_90a", "linux_aarch64") == ["H200"]
    assert names("sm_100f", "linux_x86_64") == names("sm_100a", "linux_x86_64") == ["B200"]
    assert names("sm_100f", "linux_aarch64") == ["GB200"]
    assert names("sm_103a", "linux_x86_64") == names("sm_103a", "linux_aarch64") == ["GB300"]
