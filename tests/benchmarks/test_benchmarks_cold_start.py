"""Cold-start benchmark: settings of each mode, order, and goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cold_start import __main__ as cold_start
from benchmarks.cold_start import model, modes, table
from benchmarks.shared import compiling
from nvgemm_aot.manifest.parse import load_manifest
from repository import ROOT

ALL = tuple(modes.BACKENDS)


def run(mode: str, first_s: float, own_ms: float = 0.0, **more: Any) -> dict[str, Any]:
    """Builds one measurement."""
    return {
        "mode": mode,
        "label": mode,
        "import_s": 2.0,
        "first_result_s": first_s,
        "call_us": [1000.0, 1010.0],
        "graph_us": [],
        "count": {"nvgemm": 1, "aten": 9, "triton": 0},
        "stats": {
            "declared": 0, "signature": 0, "jit": 0, "jit_kernels": 0, "missed": 0,
            "milliseconds": {"x": own_ms},
        },
        "versions": {"device": "G", "driver": "5", "torch": "2", "nvgemm-aot": "0", "bundles": []},
        **more,
    }  # fmt: skip


def record_of(*runs: dict[str, Any]) -> dict[str, Any]:
    """Builds a raw file's content."""
    commands = [{"command": "cold_start", "date": "2026-11-21"}]
    return {"what": "cold_start", "commands": commands, "batches": [64], "runs": list(runs)}


def test_each_mode_sets_what_it_is_named_for() -> None:
    kept = Path("kept")
    variables = {mode: modes.Variant(mode=mode, bundles="b").variables(kept) for mode in ALL}
    off = [mode for mode, one in variables.items() if one["NVGEMM_AOT"] == "off"]
    assert off == ["default", "aten", "aten+triton"]
    trusting = [mode for mode, one in variables.items() if one["NVGEMM_AOT_TRUST_RANKING"]]
    assert trusting == ["aten+measured"]
    compiling = [m for m, one in variables.items() if one["NVGEMM_AOT_JIT_CANDIDATES"] != "0"]
    assert compiling == ["jit", "kept"]
    keeping = [mode for mode, one in variables.items() if one.get("NVGEMM_AOT_CACHE") == "kept"]
    assert keeping == ["jit", "kept"]
    assert variables["jit"]["NVGEMM_AOT_BUNDLES"] is None
    assert variables["aten+measured"]["NVGEMM_AOT_BUNDLES"] == "b"
    assert "NVGEMM_AOT_BUNDLES" not in modes.Variant(mode="aten+bundle").variables(kept)


def test_modes_without_what_they_need_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modes, "missing_module", lambda: "cutlass")
    found = modes.variants(ALL, (1, 4), None, None, True)
    assert [one.label for one in found] == [
        "default", "aten", "aten+triton", "aten+bundle, at most 1", "aten+bundle, at most 4"
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert "aten+measured is left out: no --measured" in said
    assert "default+measured is left out: no --measured" in said
    assert "jit is left out: the builder is not installed: no cutlass" in said
    monkeypatch.setattr(modes, "missing_module", lambda: None)
    found = modes.variants(ALL, (), "e", "m", True)
    assert found[1] == modes.Variant(mode="default+measured", bundles="m")
    assert [(one.mode, one.bundles) for one in found[4:]] == [
        ("aten+bundle", "e"), ("aten+measured", "m"), ("jit", None), ("kept", None)
    ]  # fmt: skip


def test_each_turn_begins_with_another_and_what_takes_long_comes_once() -> None:
    found = [modes.Variant(mode=mode) for mode in ("aten", "aten+triton", "aten+bundle")]
    order = [one.mode for one in modes.turns(found, 3, ("aten+triton",))]
    assert order == [
        "aten", "aten+triton", "aten+bundle", "aten+bundle", "aten", "aten+bundle", "aten"
    ]  # fmt: skip


def gemms_of(device: str, batches: tuple[int, ...]) -> set[tuple[str, tuple[int, ...]]]:
    """Returns operator and sizes for every GEMM that eager execution calls."""
    found: set[tuple[str, tuple[int, ...]]] = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                found.add((func.name(), (*args[0].shape, args[1].shape[-1])))
            return func(*args, **(kwargs or {}))

    decoder, calls = model.build_model(device, batches)
    with torch.no_grad(), Recorder():
        for prefill, decode in calls:
            decoder(prefill, decode)
    return found


def test_model_has_ten_gemms_and_four_more_for_each_further_batch() -> None:
    assert len(gemms_of("cpu", (8,))) == 10
    assert len(gemms_of("cpu", (8, 1, 16))) == 10 + 2 * 4


def test_manifest_declares_every_gemm_and_no_other() -> None:
    (option,) = (one for one in cold_start.main.params if one.name == "batches")
    batches = tuple(map(int, option.default.split(",")))
    manifest = load_manifest(ROOT / "benchmarks/cold_start/manifest.yaml")
    declared = {
        (f"aten::{one.signature.op.value}", one.batch, one.m, one.n, one.k)
        for one in (declared.problem for declared in manifest.declared)
    }
    called = set()
    for name, (*batch, m, k, n) in gemms_of("meta", batches):
        called.add((name, *(batch or [1]), m, n, k))
    assert declared == called


@pytest.mark.parametrize("batches", ["0", "8,8", "64,064", "8,-1", "1,2,3,4,5,6,7,8,9", "", "a"])
def test_refuses_batches_that_cannot_be_compiled(batches: str) -> None:
    done = CliRunner().invoke(cold_start.main, ["--batches", batches])
    assert done.exit_code == 2
    assert "Invalid value for '--batches'" in done.output


def test_refuses_a_process_that_had_other_kernels_than_its_mode_means() -> None:
    def refuse(mode: str, bundles: list[str], named: str | None = "m.nvgemm", **stats: int) -> None:
        one = run(mode, 1.0)
        one["versions"]["bundles"] = bundles
        one["stats"] |= stats
        modes.refuse_other_kernels(modes.Variant(mode=mode, bundles=named), one)

    refuse("aten", [])
    refuse("aten+bundle", ["wheel 1: x"], named=None)
    with pytest.raises(click.ClickException, match=r"aten\+bundle had other .*: wheel 1: x;"):
        refuse("aten+bundle", ["wheel 1: x"])
    refuse("aten+measured", ["NVGEMM_AOT_BUNDLES: m.nvgemm"])
    refuse("jit", ["kept"], named=None, jit=10)
    refuse("kept", ["kept"], named=None, declared=10)
    with pytest.raises(click.ClickException, match="kept compiled 3 kernels and found some for 10"):
        refuse("kept", ["kept"], named=None, declared=10, jit_kernels=3)
    with pytest.raises(click.ClickException, match="no usable bundle"):
        refuse("aten+measured", [])
    with pytest.raises(click.ClickException, match=r"had other bundles .*: wheel 1: x;"):
        refuse("aten+measured", ["NVGEMM_AOT_BUNDLES: m.nvgemm", "wheel 1: x"])
    with pytest.raises(
        click.ClickException, match="compiled kernels for 8 GEMMs, found some for 2"
    ):
        refuse("jit", [], jit=8, signature=2)
    with pytest.raises(click.ClickException, match="compiled kernels for 0 GEMMs"):
        refuse("jit", [], missed=10)


def test_goals_are_held_against_what_was_measured() -> None:
    runs = [run("aten", 8.0), run("aten", 8.2), run("aten", 8.1), run("aten+triton", 41.0)]
    runs += [run("aten+bundle", 9.1, 500), run("aten+measured", 8.2, 20), run("jit", 33.1, 24_000)]
    text = "\n".join(table.table(record_of(*runs)))
    assert "aten+measured at most 1.05 x aten: 1.012 x, met" in text
    assert "aten+measured at least 5 x as fast as aten+triton: 5.00 x, met" in text
    assert "which has runs 0.20 s apart" in text
    assert "+25.00   24.000\n" in text
    # 25 s against 1 s; and against 0.1 s, which the runs of aten cannot tell from 0.2 s.
    assert (
        "+1.00    0.500   goal: 100 x less than jit: 25 x, MISSED; by the clock 48 x, MISSED"
        in text
    )
    assert "at least 125 x, met; by the clock 1200 x, met" in text
    missed = "\n".join(table.goals(table.by_label([*runs[:4], run("aten+measured", 9.2)])))
    assert "1.136 x, MISSED" in missed
    assert "4.46 x, MISSED" in missed
    assert "jit" not in missed


def test_goals_without_autotuning() -> None:
    runs = [run("default", 4.0), run("aten+triton", 41.0)]
    own = run("default+measured", 4.06, call_us=[1005.0, 1006.0], graph_us=[])
    text = "\n".join(table.goals(table.by_label([*runs, own])))
    assert "goal: default+measured at most 1.02 x default: 1.015 x, met" in text
    assert "default+measured, call_us, at most 1.01 x aten+triton: 1.000 x, met" in text
    assert "graph_us" not in text
    slow = run("default+measured", 4.2, call_us=[1100.0])
    text = "\n".join(table.goals(table.by_label([*runs, slow])))
    assert "1.050 x, MISSED" in text
    assert "1.095 x, MISSED" in text
    assert "seen on the stack" not in text
    for one, within_s in zip((*runs, slow), (0.02, 0.5, 0.06), strict=True):
        one["within_s"] = within_s
    text = "\n".join(table.goals(table.by_label([*runs, slow])))
    assert "0.060 (0.060-0.060) s of it, and without kernels 0.020 (0.020-0.020) s" in text
    assert "by that 1.0100 x" in text


def test_one_run_of_the_reference_gives_no_verdict_on_what_kernels_add() -> None:
    runs = [run("aten", 9.4), run("aten+bundle", 9.3, 500), run("jit", 33.1, 24_000)]
    text = "\n".join(table.goals(table.by_label(runs)))
    assert "which was run once" in text
    assert "goal: 100 x less than jit: not known; by the clock 48 x, MISSED" in text


def test_what_is_left_is_what_was_not_measured_and_kernels_are_kept_anew() -> None:
    found = [modes.Variant(mode=mode) for mode in ("aten", "jit", "kept")]
    order = modes.turns(found, 2, ("jit",))
    assert [one.mode for one in order] == ["aten", "jit", "kept", "kept", "aten"]
    assert modes.left_of(order, []) == order
    left = modes.left_of(order, ["aten", "jit", "kept"])
    assert [one.mode for one in left] == ["jit", "kept", "aten"]
    assert modes.left_of(order, ["aten", "aten", "jit", "kept", "kept"]) == []
    twice = modes.turns(found[1:], 2, ())
    assert [one.mode for one in modes.left_of(twice, ["jit", "kept"])] == ["jit", "kept", "jit"]


def test_table_has_a_row_for_each_variant() -> None:
    lines = table.table(record_of(run("aten", 8.0), run("default", 4.0), run("aten", 10.0)))
    row = next(line for line in lines if line.startswith("default"))
    assert row.split()[:5] == ["default", "1", "2.00", "4.00", "(4.00-4.00)"]
    assert "9.00 (8.00-10.00)  1.000" in next(line for line in lines if line.startswith("aten"))
    assert row.split()[5] == "0.444"


def test_what_fails_is_not_tried_again_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(variant: Any, _: str, batches: tuple[int, ...], __: Path) -> dict[str, Any]:
        assert batches == (64, 1, 4, 16, 256, 1024)
        asked.append(variant.mode)
        if variant.mode == "aten+bundle":
            raise click.ClickException("no usable bundle")
        return run(variant.mode, 8.0)

    monkeypatch.setattr(cold_start, "measure", measure)
    monkeypatch.setattr(cold_start, "read_from_disk", lambda: None)
    monkeypatch.setattr(cold_start, "require_gpu", lambda: None)
    path = tmp_path / "cold.json"
    arguments = ["--modes", "aten,aten+bundle", "--repeat", "3", "--json", str(path)]
    done = CliRunner().invoke(cold_start.main, arguments)
    assert done.exit_code == 1
    assert "\naten+bundle FAILED: no usable bundle\n" in done.output
    assert done.output.endswith("Error: aten+bundle FAILED, for the reasons above\n")
    assert asked == ["aten", "aten+bundle", "aten", "aten"]
    assert len(json.loads(path.read_text())["runs"]) == 3
    shown = CliRunner().invoke(cold_start.main, ["--show", str(path)])
    assert shown.output == path.with_suffix(".txt").read_text()
    assert "8.00 (8.00-8.00)" in shown.output
    refused = CliRunner().invoke(cold_start.main, arguments)
    assert refused.exit_code == 1
    assert "is there already; give --resume" in refused.output
    asked.clear()
    more = CliRunner().invoke(
        cold_start.main, ["--modes", "aten", "--repeat", "4", "--json", str(path), "--resume"]
    )
    assert more.exit_code == 0, more.output
    assert asked == ["aten"]
    record = json.loads(path.read_text())
    assert len(record["runs"]) == 4
    assert len(record["commands"]) == 2
    others = CliRunner().invoke(
        cold_start.main, ["--batches", "1,2", "--json", str(path), "--resume"]
    )
    assert others.exit_code == 1
    assert "is of batches [64, 1, 4, 16, 256, 1024], and here they are [1, 2]" in others.output


def test_runs_of_other_machines_bundles_and_models_are_not_mixed() -> None:
    other = run("aten", 8.0)
    other["versions"] = {**other["versions"], "driver": "6"}
    with pytest.raises(click.ClickException, match="have driver 5, and this one 6"):
        modes.refuse_other_machine(run("aten", 8.0), other)
    modes.refuse_other_machine(run("aten", 8.0), run("jit", 8.0))
    tuned = run("aten+measured", 8.0)
    tuned["versions"] = {**tuned["versions"], "bundles": ["another"]}
    modes.refuse_other_work([run("aten+bundle", 8.0)], tuned)
    with pytest.raises(click.ClickException, match=r"have bundles \[\], and this one"):
        modes.refuse_other_work([run("aten+measured", 8.0)], tuned)
    few = run("aten", 8.0, count={"nvgemm": 0, "aten": 9, "triton": 0})
    with pytest.raises(click.ClickException, match="have GEMMs 10, and this one 9"):
        modes.refuse_other_work([run("aten", 8.0)], few)


def test_another_machine_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(variant: Any, *_: Any) -> dict[str, Any]:
        asked.append(variant.mode)
        found = run(variant.mode, 8.0)
        found["versions"]["driver"] = str(len(asked))
        return found

    monkeypatch.setattr(cold_start, "measure", measure)
    monkeypatch.setattr(cold_start, "read_from_disk", lambda: None)
    path = tmp_path / "cold.json"
    arguments = ["--device", "cpu", "--modes", "default,aten,aten+triton", "--json", str(path)]
    done = CliRunner().invoke(cold_start.main, arguments)
    assert done.exit_code == 1
    assert "other runs have driver 1, and this one 2" in done.output
    assert asked == ["default", "aten"]
    assert len(json.loads(path.read_text())["runs"]) == 1


def test_a_bundle_that_is_not_there_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    there = tmp_path / "there.nvgemm"
    there.touch()
    done = CliRunner().invoke(
        cold_start.main, ["--device", "cpu", "--estimated", f"{there}:{tmp_path}/gone.nvgemm"]
    )
    assert done.exit_code == 2
    assert "gone.nvgemm is not there" in done.output


def test_settings_of_the_caller_are_not_those_of_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "NVGEMM_AOT_RECORD", "NVGEMM_AOT_BUNDLES", "OTHER"):
        monkeypatch.setenv(name, "1")
    variables = modes.Variant(mode="default").variables(Path("kept"))
    found = compiling.fresh_environment(tmp_path, **variables)
    assert {name for name in found if name.startswith(("NVGEMM_AOT", "TORCHINDUCTOR_"))} == {
        "NVGEMM_AOT", "NVGEMM_AOT_BUNDLES", "NVGEMM_AOT_CACHE", "NVGEMM_AOT_JIT_CANDIDATES",
        "TORCHINDUCTOR_CACHE_DIR",
    }  # fmt: skip
    assert found["OTHER"] == "1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "must hold a JSON object"),
        ('{"what": "kernels"}', "is no result of cold_start (it says 'kernels')"),
        ('{"what": "cold_start", "commands": ["x"], "batches": [1], "runs": []}', "has no runs"),
        (
            '{"what": "cold_start", "commands": [1], "batches": [1], "runs": [1]}',
            "is not as this",
        ),
    ],
)
def test_refuses_to_show_what_is_no_result(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    done = CliRunner().invoke(cold_start.main, ["--show", str(path)])
    assert done.exit_code == 1
    assert said in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_started() -> None:
    done = CliRunner().invoke(cold_start.main, ["--modes", "aten"])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith("Error: no GPU")
