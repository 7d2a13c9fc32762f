"""``nvgemm-aot rankings``: from tuned bundles to files, merged, compared, shown, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import cpu_provider
from made_rankings import GPU_A, GPU_B, entry, rankings
from nvgemm_aot.cli.main import main
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.providers import recorded_recipes
from nvgemm_aot.rankings.file import read_rankings, write_rankings
from nvgemm_aot.rankings.shipped_rankings import DIRECTORY
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.measuring.gpu import uuid_digest
from nvgemm_runtime.gemm.target import Target
from recording_kernels import Recording
from tuning_bench import PROBLEMS, SLOW_FIRST, DictatedTimer, bench, header_of, operators, run

OTHER = cpu_provider.problem(sizes=(16, 32, 64))


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["rankings", *map(str, arguments)])


def shown(*arguments: object) -> Any:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def tuned(tunable: Path, path: Path, timer: DictatedTimer, uuid: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    run(tunable, path, replace(bench(timer), uuid=uuid))
    return path


def test_two_gpus_measure_and_a_third_machine_builds_what_is_confirmed(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer, kernel_cache: Cache
) -> None:
    one = tuned(tunable, tmp_path / "one.nvgemm", dictated, "GPU-1")
    two = tuned(tunable, tmp_path / "two.nvgemm", dictated, "GPU-2")
    for path, uuid in ((one, "GPU-1"), (two, "GPU-2")):
        result = command("export", path, "-o", path.with_suffix(".json"))
        assert result.exit_code == 0, result.output
        assert "3 measurements on 1 known GPU; problems: 3 measured once" in result.stdout
        for entry_ in read_rankings(path.with_suffix(".json")).entries:
            assert entry_.origin.conditions.gpu_sha256 == uuid_digest(uuid)
            recipe = recorded_recipes(Recording(), Target(arch="sm_90a"))
            assert entry_.origin.toolchain == {**Recording().toolchain(), **recipe}
    merged = tmp_path / "merged.json"
    files = (one.with_suffix(".json"), two.with_suffix(".json"))
    result = command("merge", *files, "-o", merged)
    assert "6 measurements on 2 known GPUs; problems: 3 confirmed" in result.stdout
    again = tmp_path / "again.json"
    result = command("merge", files[1], merged, files[0], "-o", again)
    assert "duplicates dropped: 6" in result.stdout
    assert again.read_bytes() == merged.read_bytes(), "in whatever order, how often ever"
    (built,) = build(
        cpu_provider.manifest(PROBLEMS, candidates=3),
        tmp_path / "dist",
        kernel_cache,
        provider=Recording(),
        rankings=read_rankings(merged),
    ).bundles
    before, header = header_of(one), header_of(built.path)
    for measured, ranking in zip(before.rankings, header.rankings):
        assert operators(header, ranking) == operators(before, measured)
        assert ranking.measured is not None
        assert ranking.measured.is_confirmed
        assert measured.measured is not None
        assert ranking.measured.aten == measured.measured.aten


def test_one_gpu_twice_is_said_and_confirms_nothing(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer
) -> None:
    files = []
    for number, time_ns in enumerate((200.0, 201.0)):
        dictated.times = {**SLOW_FIRST, "Cpu_8x32": [time_ns]}
        path = tuned(tunable, tmp_path / f"{number}.nvgemm", dictated, "GPU-1")
        files.append(path.with_suffix(".json"))
        command("export", path, "-o", files[-1])
    result = command("merge", *files, "-o", tmp_path / "merged.json")
    assert "6 measurements on 1 known GPU; problems: 3 measured once" in result.stdout
    digest = uuid_digest("GPU-1")[:12]
    said = f"GPU {digest} (digest of its UUID) measured 3 problems more than once: that confirms"
    assert said in result.stdout


def test_tuning_on_a_second_gpu_confirms_in_the_bundle_itself(
    tunable: Path, tmp_path: Path, dictated: DictatedTimer, caplog: pytest.LogCaptureFixture
) -> None:
    one = tuned(tunable, tmp_path / "one.nvgemm", dictated, "GPU-1")
    same = tuned(one, tmp_path / "same.nvgemm", dictated, "GPU-1")
    assert caplog.text.count("measured these problems before, so this run cannot confirm") == 1
    two = tuned(one, tmp_path / "two.nvgemm", dictated, "GPU-2")
    gpus = tuple(sorted(uuid_digest(uuid) for uuid in ("GPU-1", "GPU-2")))
    for path, expected in ((one, ()), (same, ()), (two, gpus)):
        for ranking in header_of(path).rankings:
            assert ranking.measured is not None
            assert ranking.measured.confirmed_by == expected
    inspected = CliRunner().invoke(main, ["inspect", str(two)]).stdout
    assert inspected.count("confirmed by 2 GPUs") == 3
    assert CliRunner().invoke(main, ["inspect", str(one)]).stdout.count("measured once") == 3
    together = tmp_path / "together.nvgemm"
    dictated.times = {**SLOW_FIRST, "Cpu_8x32": [400.0]}
    run(one, together, replace(bench(dictated), uuid="GPU-3"))
    for ranking in header_of(together).rankings:
        assert ranking.measured is not None
        assert ranking.measured.doubts[0].startswith("two runs disagree")


def test_a_bundle_without_measurements_has_nothing_to_export(tunable: Path, tmp_path: Path) -> None:
    result = command("export", tunable, "-o", tmp_path / "r.json")
    assert result.exit_code == 26
    assert f"{tunable}: no ranking is measured, all are estimates" in result.stderr
    assert not (tmp_path / "r.json").exists()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two files that differ in every way that two files can."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    far = cpu_provider.problem(sizes=(64, 32, 64))
    write_rankings(one, rankings(entry({"x": 1000, "y": 1200}), entry({"x": 5}, problem=far)))
    write_rankings(
        other,
        rankings(
            entry({"x": 1200, "y": 1000}, gpu=GPU_B, aten=900),
            entry({"x": 700}, problem=OTHER, doubts=("it was hot",)),
        ),
    )
    return one, other


def test_diff_names_what_is_new_gone_and_changed(files: tuple[Path, Path]) -> None:
    one, other = files
    document = shown("diff", one, other)
    key = read_rankings(one).entries[0].problem.key
    assert document["only_now"] == [OTHER.key]
    assert document["only_before"] == [read_rankings(one).entries[1].problem.key]
    (changed,) = document["changed"]
    assert changed["problem"] == key
    assert changed["changes"] == [
        "winner was some/x, is aten",
        "fastest kernel 1000 -> 1000 ns, ATen 2000 -> 900 ns",
    ]
    text = command("diff", one, other).stdout
    assert f"only in {other}: {OTHER.key}" in text
    assert "1 problem in both, 1 differ" in text
    assert "1 problem in both" not in command("diff", one, one).stdout
    assert "2 problems in both, 0 differ" in command("diff", one, one).stdout


def test_rankings_that_come_with_nvgemm_aot_are_named_by_their_manifest(tmp_path: Path) -> None:
    name = "gpt-oss-20b-experts"
    count = len(shown("show", name)["problems"])
    assert count == 44, "twelve of 32 problems have measurements of two builds"
    assert shown("diff", name, name)["common"] == count
    merged = tmp_path / "merged.json"
    assert command("merge", name, name, "-o", merged).exit_code == 0
    shipped = read_rankings(DIRECTORY / f"{name}.json")
    assert read_rankings(merged) == shipped
    assert len(shipped.entries) == 70
    unknown = command("show", "no-such-manifest")
    assert unknown.exit_code == 26
    assert "no-such-manifest: there is no such file; check the path, or name" in unknown.stderr


def test_show_has_a_line_a_problem_and_merge_says_what_contradicts(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    merged = tmp_path / "merged.json"
    result = command("merge", *files, "-o", merged)
    assert result.exit_code == 0
    assert "problems: 2 doubtful, 1 measured once" in result.stdout
    assert "two runs disagree: " in result.stdout
    text = command("show", merged).stdout
    assert sum("doubtful  " in line for line in text.splitlines()) == 2
    assert "it was hot" in text
    document = shown("show", merged, "--standing", "measured once")
    (one,) = document["problems"]
    assert one["torch"] == "2.11.0"
    assert one["launches"] == "apart"
    assert document["gpus"] == [
        {"gpu_sha256": GPU_A, "measurements": 3},
        {"gpu_sha256": GPU_B, "measurements": 1},
    ]


@pytest.mark.parametrize("name", ["merge", "show", "diff"])
def test_what_is_no_rankings_file_is_an_error_with_its_own_status(
    tmp_path: Path, files: tuple[Path, Path], name: str
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "nvgemm-aot rankings", "version": 9}')
    arguments = {
        "merge": (files[0], bad, "-o", tmp_path / "out.json"),
        "show": (bad,),
        "diff": (files[0], bad),
    }[name]
    result = command(name, *arguments)
    assert result.exit_code == 26
    assert f"error: {bad}: version is 9, this release reads 1; upgrade" in result.stderr
    assert not (tmp_path / "out.json").exists()
