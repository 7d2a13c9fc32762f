"""Measurements that come with nvgemm-aot: one pool, which every build looks its problems up in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from made_rankings import GPU_A, GPU_B, GPU_C, entry, rankings
from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import provider_of
from nvgemm_aot.providers import PROVIDERS, load_provider, provider_parts
from nvgemm_aot.rankings import shipped_rankings
from nvgemm_aot.rankings.entries import Entry, merge
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.rankings.usable import RankingBasis, find_usable
from nvgemm_runtime.errors import RankingsError
from nvgemm_runtime.gemm.problem import Problem
from repository import ROOT

MANIFEST = """
version: 1
name: quickstart
targets: [{target}]
gemms:
  - {{dtype: bf16, mnk: [[1, 64, 64]], candidates: 1}}
"""


FROM_H200 = Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m1n64k64")


class Pool:
    """A directory of shipped rankings, empty at first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ship(self, name: str, *entries: Entry, edit: tuple[str, str] = ("", "")) -> None:
        """Adds or replaces a file, in whose text something may be edited."""
        path = self.directory / f"{name}.json"
        write_rankings(path, rankings(*entries))
        path.write_text(path.read_text().replace(*edit))
        shipped_rankings._shipped_files.cache_clear()
        shipped_rankings._files_by_problem.cache_clear()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """What is shipped, in the place of what really is."""
    directory = tmp_path / "pool"
    directory.mkdir()
    monkeypatch.setattr(shipped_rankings, "DIRECTORY", directory)
    return Pool(directory)


@pytest.fixture
def dry_run(tmp_path: Path) -> Callable[..., Any]:
    """Plans a user's manifest of one small problem for an H200; returns what is printed."""
    manifest = tmp_path / "mine.yaml"
    manifest.write_text(MANIFEST.format(target="{arch: sm_90a, device: H200}"))

    def run(*options: str, code: int = 0) -> Any:
        cache = ("--cache-dir", str(tmp_path / "cache"))
        command = ["build", "--dry-run", *cache, str(manifest), *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in options else result

    return run


def of_h200(times: dict[str, int], **how: Any) -> Entry:
    """A measurement of the manifest's problem, with the versions that are installed."""
    provider = load_provider("quack")
    toolchain = {**provider.toolchain(), "recipe of quack": provider.recipe}
    return entry(
        times, **{"problem": FROM_H200, "provider": "quack", "toolchain": toolchain, **how}
    )


QUACK = "quack.GemmDefaultSm90_cooperative_cluster1x1x1_tile64x16x64_swap_ab"


def test_a_users_manifest_is_ranked_by_what_is_shipped_and_the_output_counts_it(
    pool: Pool, dry_run: Callable[..., Any], tmp_path: Path
) -> None:
    bare = dry_run("--json")
    assert bare["measured"] == [
        {
            "arch": "sm_90a",
            "target": "sm_90a-linux_x86_64-cu13",
            "device": "H200",
            "problems": {},
            "shipped": 0,
            "own": 0,
            "estimated": 1,
            "notes": [],
        }
    ]
    pool.ship("a", of_h200({QUACK: 1234}))
    pool.ship("b", of_h200({QUACK: 1236}, gpu=GPU_B, date="2026-11-23"))
    document = dry_run("--json")
    (found,) = document["measured"]
    assert (found["problems"], found["shipped"], found["own"], found["estimated"]) == (
        *({"confirmed": 1}, 1, 0, 0),
    ), "files of the pool confirm each other"
    (planned,) = document["targets"][0]["problems"]
    assert planned["kernels"] == [{"operator": QUACK, "time_ns": 1236}]
    assert document["rankings"] == []
    said = "sm_90a: problems ranked by measurements: 1 (1 shipped: 1 confirmed); by estimates: 0"
    assert said in dry_run().output
    only = dry_run("--json", "--estimates-only")
    assert (only["targets"], only["measured"]) == (bare["targets"], bare["measured"])
    assert dry_run("--estimates-only", "--rankings", "a", code=2)
    mine = tmp_path / "mine.json"
    write_rankings(mine, rankings(of_h200({QUACK: 1500}, date="2026-11-24", gpu=GPU_C)))
    document = dry_run("--json", "--rankings", str(mine))
    (found,) = document["measured"]
    assert (found["shipped"], found["own"], document["rankings"]) == (0, 1, [str(mine)])
    assert "(1 from your files: 1 " in dry_run("--rankings", str(mine)).output


def test_measurements_of_others_are_not_looked_at_nor_part_of_a_plan(
    pool: Pool, dry_run: Callable[..., Any]
) -> None:
    pool.ship("a", of_h200({QUACK: 1234}, gpu=GPU_A))
    before = dry_run("--json")
    other = replace(FROM_H200, n=128)
    pool.ship("b", of_h200({QUACK: 1}, problem=other), edit=("2026-11-21", "no day"))
    assert dry_run("--json") == before
    assert shipped_rankings.shipped_rankings([FROM_H200]).entries
    with pytest.raises(RankingsError, match="date must be a day"):
        shipped_rankings.shipped_rankings([other])
    between = replace(other, m=3), replace(other, m=1)
    assert not shipped_rankings.shipped_rankings([replace(other, m=2), between[0]]).entries
    with pytest.raises(RankingsError, match="date must be a day"):
        shipped_rankings.shipped_rankings(between)


@pytest.mark.parametrize(
    ("how", "noted"),
    [
        ({"product": "NVIDIA H100"}, None),
        ({"arch": "sm_100f"}, None),
        ({"provider": "another"}, None),
        ({"toolchain": {"quack-kernels": "9"}}, "1 time of kernels of quack not used: measured w"),
    ],
)
def test_of_what_is_shipped_only_another_version_is_said_and_strict_asks_for_nothing(
    pool: Pool, dry_run: Callable[..., Any], how: dict[str, Any], noted: str | None
) -> None:
    pool.ship("a", of_h200({QUACK: 1000}, **how))
    (found,) = dry_run("--json", "--strict")["measured"]
    assert (found["shipped"], found["estimated"]) == (0, 1)
    assert [note[:47] for note in found["notes"]] == ([] if noted is None else [noted])


def test_of_a_users_file_all_that_does_not_fit_is_said_and_strict_refuses_it(
    pool: Pool, dry_run: Callable[..., Any], tmp_path: Path
) -> None:
    pool.ship("a", of_h200({QUACK: 1234}))
    path = tmp_path / "data.json"
    write_rankings(path, rankings(of_h200({QUACK: 1000}, product="NVIDIA H100")))
    note = (
        "1 measurement taken on NVIDIA H100, not used for sm_90a on NVIDIA H200: add "
        "it to the target's devices, or measure on this one"
    )
    assert f"by estimates: 0\n  {note}" in dry_run("--rankings", str(path)).output
    strict = dry_run("--rankings", str(path), "--strict", code=26)
    assert f"none of the rankings fits the build (--strict): {note}" in strict.stderr
    path.write_text("{}")
    result = dry_run("--rankings", str(path), code=26)
    assert f"error: {path}: format must be 'nvgemm-aot rankings'" in result.stderr


def test_shipped_rankings_may_be_named_and_count_anyway(
    dry_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dry_run("--json")
    for name in ("qwen3-8b", "shipped"):
        assert dry_run("--rankings", name, "--json") == plain
        said = f"nvgemm-aot: --rankings {name} has no effect: every build uses the measurements"
        assert said in dry_run("--rankings", name).stderr
    unknown = dry_run("--rankings", "no-such-model", code=26)
    assert "no-such-model: there is no such file" in unknown.stderr
    assert "a manifest's: gpt-oss-20b-experts, hgemm-1000, llama-3.1-8b" in unknown.stderr
    monkeypatch.chdir(tmp_path)
    Path("llama-3.1-8b").mkdir()
    beside = dry_run("--rankings", "llama-3.1-8b", "--json")
    assert beside["rankings"] == [], "a directory is no file"
    write_rankings(Path("qwen3-8b"), rankings(entry({"x": 1000})))
    own = dry_run("--rankings", "qwen3-8b", "--json")
    assert own["rankings"] == ["qwen3-8b"], "a file comes first"


def test_the_pool_is_every_file_and_all_of_them_can_be_read() -> None:
    paths = sorted(shipped_rankings.DIRECTORY.glob("*.json"))
    several = [read_rankings(path) for path in paths]
    assert all(one.entries for one in several)
    assert shipped_rankings.all_shipped_rankings() == merge(several)
    assert all(one.is_shipped for one in shipped_rankings.all_shipped_rankings().entries)
    assert not any(one.is_shipped for every in several for one in every.entries)
    declared = load_manifest(ROOT / "manifests" / "llama-3.1-8b.yaml").declared
    problems = {entry.problem for entry in declared}
    found = shipped_rankings.shipped_rankings(problems).entries
    assert {one.problem for one in found} >= problems
    whole = [one for one in merge(several).entries if one.problem in problems]
    assert [one for one in found if one.problem in problems] == whole


def test_looking_up_what_is_shipped_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "from nvgemm_runtime.gemm.problem import Problem\n"
        "from nvgemm_aot.rankings.shipped_rankings import shipped_rankings\n"
        "key = 'mm/tn/bf16xbf16/fp32/bf16/m16n4096k4096'\n"
        "print(len(shipped_rankings([Problem.parse(key)]).entries) > 2, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "True False\n"


@pytest.mark.parametrize(
    "path",
    sorted(shipped_rankings.DIRECTORY.glob("*.json")),
    ids=lambda one: one.stem,
)
def test_a_build_by_name_has_a_use_for_all_that_is_shipped(path: Path) -> None:
    manifest = load_manifest(ROOT / "manifests" / f"{path.stem}.yaml")
    entries = read_rankings(path).entries
    assert {one.origin.arch for one in entries} <= {one.target.arch for one in manifest.targets}
    sizes: dict[Problem, list[int]] = {}
    for one in manifest.declared:
        sizes.setdefault(replace(one.problem, m=1), []).append(one.problem.m)
    for problem in (one.problem for one in entries):
        declared = sizes[replace(problem, m=1)]
        assert min(declared) <= problem.m <= max(declared), problem.key
    providers = {kernel.provider for one in entries for kernel, _ in one.kernels}
    assert providers <= {part.name for part in provider_parts(provider_of(manifest))}


def test_the_guide_says_what_is_shipped() -> None:
    guide = (ROOT / "docs" / "guide" / "tuning.md").read_text()
    rows = re.findall(r"^\| (NVIDIA [^|]*)" + r" \| (\d+)" * 5 + r" \|$", guide, re.M)
    said = {gpu: tuple(map(int, counts)) for gpu, *counts in rows}
    pool = shipped_rankings.all_shipped_rankings()
    found = {}
    for gpu in {one.origin.gpu for one in pool.entries}:
        toolchains: dict[str, dict[str, str]] = {name: {} for name in PROVIDERS}
        basis = RankingBasis(arch="sm_90a", gpu=gpu, toolchains=toolchains)
        usable = find_usable(pool, basis).problems.values()
        counts = Counter(one.assessment.standing for one in usable)
        standings = ("confirmed", "repeated", "measured once", "doubtful")
        found[gpu] = (counts.total(), *(counts[one] for one in standings))
    assert said == found
    types = {one.problem.signature.out.value for one in pool.entries}
    assert types == {"bf16", "fp16"}
    (passage,) = re.findall(r"They cover the manifests (.*?)\n\n", guide, re.S)
    named = set(re.findall(r"`([^`]*)`", passage))
    assert named == {path.stem for path in shipped_rankings.DIRECTORY.glob("*.json")}
