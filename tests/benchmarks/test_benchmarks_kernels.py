"""Kernel benchmark against ATen and Triton: order and table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import matching_headers
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import triton_gemm
from benchmarks.kernels.table import ProblemTimes, table
from benchmarks.shared import bundled, measuring
from matching_headers import header
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import BACK_TO_BACK
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import DType, Layout, Problem
from synthetic_content import SIGNATURE
from synthetic_facts import B200


def problem(m: int, dtype: DType = DType.BF16) -> Problem:
    return Problem(signature=bundled.plain(dtype, Layout.TN), m=m, n=64, k=32)


PROBLEMS = {
    one: ["first", "fast", "wrong"]
    for one in (problem(1), problem(16), problem(2048), problem(16, DType.FP16))
}


def entry(aten: int, triton: int | None, *bundled: int, **more: Any) -> dict[str, Any]:
    """Builds a problem's entry from nanoseconds."""
    return {
        "aten": [aten] * 4,
        "triton": None if triton is None else [triton] * 4,
        "triton_s": None if triton is None else 2.5,
        "why_no_triton": None,
        "kernels": {f"kernel{number}": [time] * 4 for number, time in enumerate(bundled)},
        "thrown_out": {},
        **more,
    }


def test_order_is_fixed_and_a_sample_is_its_beginning() -> None:
    every = kernels.in_order(PROBLEMS, None)
    assert sorted(every) == sorted(PROBLEMS)
    assert kernels.in_order(dict.fromkeys(reversed(every)), 2) == every[:2]


def test_what_was_measured_without_triton_is_measured_again_with_it() -> None:
    without, tried = entry(10, None, 9), entry(10, None, 9, triton_s=3.0, why_no_triton="none fits")
    assert not kernels.is_done(None, wants_triton=False)
    assert kernels.is_done(without, wants_triton=False)
    assert not kernels.is_done(without, wants_triton=True)
    assert kernels.is_done(tried, wants_triton=True)


def test_ratios_are_over_the_faster_of_aten_and_triton() -> None:
    one = ProblemTimes.from_json(problem(1).key, entry(1000, 800, 900, 400))
    assert one.best_of_all == one.bundle == pytest.approx(2)
    assert one.bundle_to_aten == pytest.approx(2.5)
    assert one.first_ranked == pytest.approx(400 / 900)
    slow = ProblemTimes.from_json(problem(1).key, entry(1000, 800, 1600))
    assert (slow.best_of_all, slow.bundle) == (1, pytest.approx(0.5))
    unlucky = entry(1000, None, 900)
    unlucky["kernels"]["kernel0"] = [900, 1250, 1, 9999]
    assert ProblemTimes.from_json(problem(1).key, unlucky).best_of_all == pytest.approx(0.8)


def test_table_sets_apart_what_has_no_triton_and_names_what_was_thrown_out() -> None:
    record = {
        problem(1).key: entry(1000, 800, 400),
        problem(2048).key: entry(1000, 1250, 4000),
        problem(16).key: entry(1000, None, 800),
        problem(16, DType.FP16).key: entry(1000, 900, thrown_out={"ab" * 32: "wrong"}),
    }
    text = "\n".join(table(record))
    row = r"^{} +{} +{} +{} +{} +{} +{} +{}$"
    whole = row.format(
        "over ATen and Triton", 2, r"1\.414", r"1\.000", r"0\.707", r"0\.791", "50%", "50%"
    )
    assert re.search(whole, text, re.MULTILINE)
    assert re.search(r"^  m 1-64 +1 +2\.000 +2\.000", text, re.MULTILINE)
    assert re.search(r"^  m 1 +1 +2\.000 +2\.000", text, re.MULTILINE)
    assert re.search(r"^  m 1024- +1 +1\.000 +1\.000 +0\.250", text, re.MULTILINE)
    assert re.search(r"^over ATen alone +1 +1\.250", text, re.MULTILINE)
    assert "took 8 s for 3 problems; 0 have no Triton kernel" in text
    assert f"no bundled kernel was exact: {problem(16, DType.FP16).key}" in text
    assert "abababababab: wrong" in text


def test_generated_code_counts_as_triton_only_without_calls_of_others() -> None:
    mine = "def call(args):\n    triton_tem_fused_mm_0.run(arg0, arg1, buf0, grid=grid)\n"
    assert triton_gemm.why_not_triton(mine) is None
    theirs = mine + "    extern_kernels.mm(arg0, arg1, out=buf1)\n"
    assert (
        triton_gemm.why_not_triton(theirs)
        == "Inductor calls extern_kernels.mm, triton_tem_fused_mm_0.run"
    )
    assert triton_gemm.why_not_triton("def call(args): ...") == "Inductor wrote no Triton kernel"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the clock, the GPU and its kernels; lists Triton's compilations."""
    compiled: list[str] = []

    def draw(m: int, n: int, k: int, layout: Any, dtype: Any) -> Any:
        return measuring.Exact.draw(m, n, k, layout, dtype, device="cpu")

    def load_exact(ids: list[str], exact: Any) -> Any:
        def right(a: Any, b: Any, out: Any) -> None:
            out.copy_(a.float() @ b.float())

        assert exact.error(right) == 0
        launches = {id_: right for id_ in ids if id_ != "wrong"}
        return bundled.CheckedKernels(launches=launches, thrown_out={"wrong": "wrong"})

    def times(
        ways: Mapping[str, Any], rounds: int, *_: Any, launches: str
    ) -> dict[str, list[float]]:
        for way in ways.values():
            way.launch(*way.sets[0])
        nanoseconds = {"aten": 1000.0, "triton": 900.0, "first": 950.0, "fast": 750.0}
        if launches == BACK_TO_BACK:
            nanoseconds["fast"] = 600.0
        return {name: [nanoseconds[name]] * rounds for name in ways}

    def compile_triton(operands: Any) -> Any:
        compiled.append(f"{operands[0].dtype} {operands[0].shape[0]}")
        launch = (lambda a, b, out: None) if operands[0].shape[0] > 1 else None
        return triton_gemm.TritonGemm(launch=launch, seconds=2.0, why_none=None)

    monkeypatch.setattr(kernels, "declared", lambda dtypes: {
        one: ids for one, ids in PROBLEMS.items() if one.signature.a in set(dtypes)
    })  # fmt: skip
    monkeypatch.setattr(
        kernels, "Arena", lambda dtype, of: measuring.Arena(dtype, of, device="cpu")
    )
    monkeypatch.setattr(kernels, "Exact", SimpleNamespace(draw=draw))
    monkeypatch.setattr(kernels, "load_exact", load_exact)
    monkeypatch.setattr(kernels, "offline_ns", times)
    monkeypatch.setattr(kernels, "compile_triton", compile_triton)
    monkeypatch.setattr(kernels, "triton_version", lambda: "3")
    monkeypatch.setattr(kernels, "environment", lambda **_: {"gpu": "G", "bundles": ["one"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NVGEMM_AOT", "off")  # restored afterwards
    return compiled


def test_measures_what_is_left_and_triton_for_as_many_as_asked(
    tmp_path: Path, on_cpu: list[str]
) -> None:
    path = tmp_path / "kernels.json"
    run = ["measure", str(path), "--rounds", "4"]
    done = CliRunner().invoke(kernels.main, [*run, "--sample", "3", "--triton", "1"])
    assert done.exit_code == 0, done.output
    assert len(on_cpu) == 1
    assert done.output.count("THROWN OUT") == 3 + 3  # as it goes, and in the table
    entries = kernels.Results.read(path, "kernels").entries
    assert list(entries) == [one.key for one in kernels.in_order(PROBLEMS, 3)]
    assert sum(one["triton_s"] is not None for one in entries.values()) == 1
    assert all(list(one["kernels"]) == ["first", "fast"] for one in entries.values())
    done = CliRunner().invoke(kernels.main, [*run, "--resume"])
    assert done.exit_code == 0, done.output
    assert len(on_cpu) == 4
    entries = kernels.Results.read(path, "kernels").entries
    assert sorted(entries) == sorted(one.key for one in PROBLEMS)
    assert re.search(r"^over ATen and Triton +3 +1\.200", done.output, re.MULTILINE)
    assert re.search(r"^over ATen alone +1 +1\.333", done.output, re.MULTILINE)
    apart, beside = done.output.split("launches back to back\n")
    assert re.search(r"^launches apart\nover ATen and Triton +3 +1\.200", apart, re.MULTILINE)
    assert re.match(r"over ATen and Triton +3 +1\.500", beside)
    shown = CliRunner().invoke(kernels.main, ["table", str(path)])
    assert shown.output == path.with_suffix(".txt").read_text()
    done = CliRunner().invoke(kernels.main, [*run, "--resume"])
    assert done.exit_code == 0, done.output
    assert len(on_cpu) == 4


def test_results_of_types_measured_apart_are_joined(tmp_path: Path, on_cpu: list[str]) -> None:
    parts = [tmp_path / f"{dtype}.json" for dtype in ("bf16", "fp16")]
    for part in parts:
        run = ["measure", str(part), "--dtypes", part.stem, "--rounds", "4"]
        done = CliRunner().invoke(kernels.main, run)
        assert done.exit_code == 0, done.output
    path = tmp_path / "all.json"
    run = ["join", str(path), *map(str, parts)]
    done = CliRunner().invoke(kernels.main, run)
    assert done.exit_code == 0, done.output
    assert sorted(kernels.Results.read(path, "kernels").entries) == sorted(
        one.key for one in PROBLEMS
    )
    assert done.output.count("$ python -m") == len(parts)
    assert "is there already" in CliRunner().invoke(kernels.main, run).output


def test_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["measure", str(tmp_path / "kernels.json")]
    monkeypatch.setenv("NVGEMM_AOT", "off")  # restored afterwards
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in CliRunner().invoke(kernels.main, run).output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "declared", lambda dtypes: {})
    refused = CliRunner().invoke(kernels.main, [*run, "--dtypes", "fp16"])
    assert "no usable bundle declares a matrix product in fp16" in refused.output
    assert not list(tmp_path.iterdir())


def found_bundle(header: Header, refusal: str | None = None) -> Any:
    """Returns a bundle with the fields that the benchmark reads."""
    return SimpleNamespace(bundle=SimpleNamespace(header=header), refusal=lambda facts: refusal)


def test_declared_are_plain_products_of_usable_bundles_with_all_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = replace(SIGNATURE, out=DType.FP32)
    one = header(matching_headers.problem(1), matching_headers.problem(16))
    other = header(
        matching_headers.problem(16), matching_headers.problem(64, signature=wide), seed=1
    )
    refused = header(matching_headers.problem(1024))
    found = [found_bundle(one), found_bundle(other), found_bundle(refused, "another GPU")]
    found.append(SimpleNamespace(bundle=None))
    monkeypatch.setattr(bundled, "bundles", lambda: found)
    monkeypatch.setattr(bundled, "device_facts", lambda *_: B200)
    declared = bundled.declared([SIGNATURE.a])
    assert sorted(problem.m for problem in declared) == [1, 16]
    ids = [
        built.kernels[place.kernel].id
        for built in (one, other)
        for ranking in built.rankings
        if ranking.problem.m == 16
        for place in ranking.kernels
    ]
    assert declared[matching_headers.problem(16)] == list(dict.fromkeys(ids))
    assert bundled.declared([DType.FP16]) == {}


def test_kernels_that_are_wrong_or_cannot_be_launched_are_thrown_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = measuring.Exact.draw(8, 8, 16, Layout.TN, torch.bfloat16, device="cpu")

    def load_kernel(id_: str) -> Any:
        if id_ == "missing":
            raise NoKernelError("no installed bundle holds it")
        factor = {"right": 1, "wrong": 2}[id_]
        return SimpleNamespace(launch=lambda a, b, out: out.copy_(a.float() @ b.float() * factor))

    monkeypatch.setattr(bundled, "load_kernel", load_kernel)
    checked = bundled.load_exact(["wrong", "right", "missing"], exact)
    assert list(checked.launches) == ["right"]
    assert checked.thrown_out == {
        "wrong": "its sums of zeros and ones are wrong: relative error 1",
        "missing": "NoKernelError: no installed bundle holds it",
    }
