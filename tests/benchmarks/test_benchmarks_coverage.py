"""benchmarks/build/coverage.py: counts, and continuing after an interruption."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.build import coverage


def built(name: str, *kernels: str, cpu_seconds: float = 60.0) -> Any:
    return coverage.BuiltManifest(
        name=name,
        target="sm_100f",
        problems=3,
        choices=5,
        kernels=kernels,
        failed=(),
        file_bytes=1000,
        cpu_seconds=cpu_seconds,
    )


def test_covers_every_shipped_manifest_and_int8() -> None:
    manifests = [coverage.load(path) for path in coverage.MANIFESTS]
    targets = {m.name: [target.target.arch for target in m.targets] for m in manifests}
    assert targets.pop("int8-sm100") == ["sm_100a"]
    shipped = {path.stem for path in (coverage.ROOT / "manifests").glob("*.yaml")}
    assert targets == {name: ["sm_100f"] for name in shipped}


def test_a_kernel_that_several_manifests_have_counts_once() -> None:
    both = [built("one", "a", "b"), built("two", "b", "c", cpu_seconds=90)]
    assert coverage.row(both[1]) == ("two", "sm_100f", 3, 5, 2, "1000 B", 1.5)
    assert coverage.total(both) == ("all", "", 6, 10, 3, "2000 B", 2.5)


def test_what_was_measured_is_not_built_again(tmp_path: Path) -> None:
    path = next(path for path in coverage.MANIFESTS if path.stem == "quickstart")
    manifest, done = coverage.load(path), built("quickstart", "a")
    (tmp_path / "built.json").write_text(json.dumps(asdict(done)))
    assert coverage.measure(manifest, tmp_path) == done


def test_time_of_an_interrupted_run_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    ticks = iter([100.0, 107.0, 200.0, 205.0])
    monkeypatch.setattr(coverage, "cpu_seconds", lambda: next(ticks))
    monkeypatch.setattr(coverage, "build", interrupted)
    manifest = coverage.load(coverage.MANIFESTS[-1])
    for spent in (7.0, 12.0):
        with pytest.raises(KeyboardInterrupt):
            coverage.measure(manifest, tmp_path)
        assert json.loads((tmp_path / "spent.json").read_text()) == spent
    assert not (tmp_path / "built.json").exists()
