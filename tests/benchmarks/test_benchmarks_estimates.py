"""Corrections of estimates: reading measurements, and fitting."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks.estimates import fitting, measuring, schedules
from benchmarks.estimates.__main__ import main
from benchmarks.estimates.every_kernel import build_every_kernel
from benchmarks.estimates.records import Measurements, read_times
from benchmarks.estimates.winners import short_name
from fake_provider import FakeProvider, candidate
from nvgemm_aot.manifest.parse import Declared, Manifest, load_manifest
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT, STATIC_PERSISTENT
from nvgemm_aot.providers.heuristics.corrections import read_correction
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.gemm.problem import Problem, Signature

KEY = "mm/tn/bf16xbf16/fp32/bf16"
SIZES = [(1024, 1024), (2048, 2048), (4096, 2048), (4096, 4096), (8192, 2048), (8192, 4096)]
PROBLEMS = [Problem.parse(f"{KEY}/m{m}n{n}k{k}") for m in (1, 64, 300, 4096) for n, k in SIZES]
OPERATORS = ("a", "b", "c", "d")
"""Operators, each with a longer tile along k than the one before."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Header]:
    folder = tmp_path_factory.mktemp("estimates")
    manifest = Manifest(
        name="estimates",
        description="",
        targets=(build_target("sm_90a"),),
        declared=tuple(Declared(problem=one, candidates=1) for one in sorted(PROBLEMS)),
        providers=(FakeProvider.name,),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_OPERATORS", " ".join(OPERATORS))
        header, lost = build_every_kernel(
            manifest, folder / "all.nvgemm", Cache(folder / "cache"), jobs=1, progress=None
        )
    assert not lost
    return folder / "all.nvgemm", header


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_OPERATORS", " ".join(OPERATORS))


def record(header: Header, best: str = "d", noise: float = 0.01) -> dict[str, Any]:
    """Builds times by which operators are slower the further they are from ``best``."""
    dice = random.Random(7)
    apart = {name: abs(OPERATORS.index(name) - OPERATORS.index(best)) for name in OPERATORS}
    return {
        "what": measuring.WHAT,
        "gpu": "NVIDIA H200",
        "date": "2026-11-22",
        "timing": measuring.APART,
        "kernels": [measuring.kernel_json(kernel) for kernel in header.kernels],
        "times_ns": {
            problem.key: [
                1000.0 * problem.m**0.5 * (1 + apart[kernel.operator] / 5) * dice.gauss(1, noise)
                for kernel in header.kernels
            ]
            for problem in PROBLEMS
        },
    }


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_bundle_of_every_kernel_ranks_all_of_them(bundle: tuple[Path, Header]) -> None:
    _, header = bundle
    assert {kernel.operator for kernel in header.kernels} == set(OPERATORS)
    assert {len(ranking.kernels) for ranking in header.rankings} == {len(OPERATORS)}


def test_times_of_every_program_are_read(bundle: tuple[Path, Header], tmp_path: Path) -> None:
    path, header = bundle
    ids = [kernel.id for kernel in header.kernels]
    key = PROBLEMS[0].key
    times = [1000.0, 2000.0, 3000.0, 4000.0]
    documents = {
        "estimates": {
            "what": "estimates",
            "kernels": [measuring.kernel_json(kernel) for kernel in header.kernels],
            "times_ns": {key: times},
        },
        "ranking": {"what": "ranking", "gpu": "G", "kernels": ids, "times_ns": {key: times}},
        "kernels": {
            "what": "kernels",
            "environment": {"gpu": "G"},
            "runs": [{"date": "2026-11-22"}],
            "entries": {
                key: {
                    "kernels": {
                        id_: [round(ns) - 10, round(ns) + 10, 0, 9000]
                        for id_, ns in zip(ids, times)
                    }
                }
            },
        },
        "tune": {
            "problems": {
                key: {
                    "kernels": [[id_, round(ns), 5] for id_, ns in zip(ids, times)],
                    "date": "2026-11-22",
                }
            }
        },
    }
    for name, document in documents.items():
        measured = read_times(path, [written(tmp_path / f"{name}.json", document)])
        assert measured.target == build_target("sm_90a")
        ((problem, row),) = measured.rows.items()
        assert problem == PROBLEMS[0]
        assert [(one.operator, ns) for one, ns in row] == [
            (kernel.operator, ns) for kernel, ns in zip(header.kernels, times)
        ]


def test_a_kernel_that_was_wrong_has_no_time(bundle: tuple[Path, Header], tmp_path: Path) -> None:
    path, header = bundle
    document = record(header)
    document["times_ns"] = {PROBLEMS[0].key: [None, 2.0, 3.0, 4.0]}
    measured = read_times(path, [written(tmp_path / "times.json", document)])
    ((_, row),) = measured.rows.items()
    assert [one.operator for one, _ in row] == [k.operator for k in header.kernels[1:]]


def test_a_file_names_its_own_kernels_and_those_not_listed_are_left_out(
    bundle: tuple[Path, Header], tmp_path: Path
) -> None:
    """Kernels "b" and "d" come from another bundle; "gone" is no longer listed."""
    path, _ = bundle
    kernels = [[name * 64, FakeProvider.name, name, KEY] for name in ("b", "gone", "d")]
    times = {PROBLEMS[0].key: [2.0, 1.0, 4.0], PROBLEMS[1].key: [None, 1.0, None]}
    document = {"what": measuring.WHAT, "kernels": kernels, "times_ns": times}
    measured = read_times(path, [written(tmp_path / "times.json", document)])
    ((problem, row),) = measured.rows.items()
    assert problem == PROBLEMS[0]
    assert [(one.operator, ns) for one, ns in row] == [("b", 2.0), ("d", 4.0)]


def test_sizes_held_back_are_judged_by_file_where_there_are_several(
    bundle: tuple[Path, Header], tmp_path: Path
) -> None:
    """The second file's times count for a problem in two files."""
    path, header = bundle
    document = record(header)
    other = {**document, "times_ns": dict([*document["times_ns"].items()][:12])}
    paths = [written(tmp_path / "a.json", document), written(tmp_path / "b.json", other)]
    done = CliRunner().invoke(main, ["fit", str(path), *map(str, paths)])
    assert done.exit_code == 0, done.output
    counts = {line.split(",")[0]: line.split()[-3] for line in done.output.splitlines()[3:-1]}
    assert (counts["a"], counts["b"], counts["all"]) == ("4", "4", "8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"what": "ranking", "kernels": ["0" * 64] * 4},
            "has times of kernel 000000000000, which neither",
        ),
        ({"times_ns": {}}, "no problem was measured"),
        ({"what": "nothing known"}, "holds no times of kernels"),
    ],
)
def test_files_of_another_bundle_or_program_are_refused(
    bundle: tuple[Path, Header], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path, header = bundle
    times = written(tmp_path / "times.json", {**record(header), **change})
    done = CliRunner().invoke(main, ["fit", str(path), str(times)])
    assert done.exit_code == 1
    assert said in done.output


def test_what_is_fitted_is_better_on_sizes_held_back_and_is_written_once(
    bundle: tuple[Path, Header], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, header = bundle
    kept = written(tmp_path / "corrections.json", {"corrections": []})
    monkeypatch.setattr(fitting, "PATH", kept)
    times = written(tmp_path / "times.json", record(header))
    texts = []
    for _ in range(2):
        done = CliRunner().invoke(main, ["fit", str(path), str(times), "--write"])
        assert done.exit_code == 0, done.output
        texts.append(kept.read_text(encoding="utf-8"))
    assert texts[0] == texts[1], "deterministic, and in the place of the one before"
    (entry,) = json.loads(texts[0])["corrections"]
    correction = read_correction(entry)
    assert correction.providers == (FakeProvider.name,)
    assert "NVIDIA H200, 2026-11-22, apart" in correction.source
    before, after = entry["judged"]["first"]
    assert before > 1.1 > 1.03 > after
    assert entry["judged"]["held_back"] == 8


def test_what_is_no_better_than_the_model_is_not_written(
    bundle: tuple[Path, Header], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are random, so no fit helps elsewhere."""
    path, header = bundle
    kept = written(tmp_path / "corrections.json", {"corrections": []})
    monkeypatch.setattr(fitting, "PATH", kept)
    model_is_right = record(header, best="a", noise=0.0)
    times = written(tmp_path / "times.json", model_is_right)
    done = CliRunner().invoke(main, ["fit", str(path), str(times), "--write"])
    assert done.exit_code == 1
    assert "nothing written" in done.output
    assert json.loads(kept.read_text(encoding="utf-8")) == {"corrections": []}


def test_too_few_sizes_are_refused(bundle: tuple[Path, Header], tmp_path: Path) -> None:
    path, header = bundle
    document = record(header)
    few = {PROBLEMS[0].key: document["times_ns"][PROBLEMS[0].key]}
    times = written(tmp_path / "times.json", {**document, "times_ns": few})
    done = CliRunner().invoke(main, ["fit", str(path), str(times)])
    assert done.exit_code == 1
    assert "too few sizes were measured" in done.output


def test_the_spacer_is_taken_off_and_wrong_kernels_have_no_time() -> None:
    measured = {"one": [1500.0, 1400.0, 1600.0], measuring.SPACER: [500.0, 400.0, 600.0]}
    assert measuring.without_spacer(
        measured, {"one": 9.0, "far": 7000.0}, ["one", "far", "bad"]
    ) == [
        1000.0,
        7000.0,
        None,
    ]


def test_winners_are_counted_and_compared_with_aten(
    bundle: tuple[Path, Header], tmp_path: Path
) -> None:
    """At one problem only d is fast, at the other c is within a hundredth."""
    _, header = bundle
    places = [kernel.operator for kernel in header.kernels]
    near, alone = PROBLEMS[:2]
    times = {near: {"d": 1000.0, "c": 1009.0}, alone: {"d": 4000.0, "c": 4100.0}}
    document = {
        **record(header),
        "times_ns": {key.key: [row.get(name) for name in places] for key, row in times.items()},
        "aten_ns": {near.key: 900.0, alone.key: 4400.0},
    }
    done = CliRunner().invoke(main, ["winners", str(written(tmp_path / "t.json", document))])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert [line[-4:] for line in lines if line[0] == "m"] == [
        ["0.9", "1.0", "0.900", "d"],
        ["4.4", "4.0", "1.100", "d"],
    ]
    assert lines[-2:] == [["2", "2", "d"], ["0", "1", "c"]]
    assert "2 problems: ATen takes 0.995 times" in done.output


def test_winners_need_times_of_aten(bundle: tuple[Path, Header], tmp_path: Path) -> None:
    _, header = bundle
    times = written(tmp_path / "times.json", record(header))
    done = CliRunner().invoke(main, ["winners", str(times)])
    assert done.exit_code == 1
    assert "has no aten_ns" in done.output


def test_names_of_designs_have_no_types() -> None:
    name = "cutedsl.Sm90Gemm_tnt_ABFloat16_BBFloat16_outBFloat16_accFloat32_cluster1x1x1_tile64x64"
    assert short_name(name) == "cutedsl.Sm90Gemm_cluster1x1x1_tile64x64"
    other = "quack.GemmDefaultSm90_pingpong_dynamic_cluster2x1x1_tile128x192x64"
    assert short_name(other) == other


def schedule(name: str, scheduler: str, **change: Any) -> Candidate:
    signature = Signature.parse(KEY)
    one = candidate(name, signature)
    return replace(one, design=replace(one.design, scheduler=scheduler), **change)


def measured(rows: dict[Problem, list[tuple[Candidate, float]]]) -> Measurements:
    return Measurements(target=build_target("sm_90a"), rows=rows, files={}, source="a GPU")


def test_dynamic_schedules_are_compared_with_the_static_ones_of_the_same_kernels() -> None:
    static = schedule("static", STATIC_PERSISTENT)
    dynamic = schedule("dynamic", DYNAMIC_PERSISTENT)
    pingpong = schedule("pingpong", STATIC_PERSISTENT, traits=("pingpong",))
    lone = schedule("lone", DYNAMIC_PERSISTENT, traits=("another",))
    first, second, third = PROBLEMS[:3]
    text = schedules.compare(
        measured(
            {
                first: [(static, 1100.0), (dynamic, 1000.0), (pingpong, 1050.0)],
                second: [(static, 1000.0), (dynamic, 2000.0), (lone, 1600.0)],
                third: [(static, 1000.0), (lone, 1.0)],  # no twin: it says nothing of schedules
            }
        )
    )
    lines = text.splitlines()
    assert lines[2] == f"{first.key}  1.1  1.0  1.050  1.100"
    assert lines[3] == f"{second.key}  1.0  1.6  0.625  0.500"
    assert lines[4:] == ["2 problems, at 1 the fastest is dynamic  0.810  0.742"]


def test_without_twins_there_is_nothing_to_compare() -> None:
    static = schedule("static", STATIC_PERSISTENT)
    with pytest.raises(click.ClickException, match="no problem has times of a dynamic kernel"):
        schedules.compare(measured({PROBLEMS[0]: [(static, 1.0)]}))


def test_the_manifest_of_schedules_has_twins() -> None:
    manifest = load_manifest(Path(schedules.__file__).with_name("schedules.yaml"))
    (signature,) = {one.problem.signature for one in manifest.declared}
    target, *_ = manifest.targets
    listed = load_provider("+".join(manifest.providers)).enumerate(signature, target).candidates
    rows = {entry.problem: [(one, 1.0) for one in listed] for entry in manifest.declared}
    assert "1.000  1.000" in schedules.compare(measured(rows)).splitlines()[-1]
