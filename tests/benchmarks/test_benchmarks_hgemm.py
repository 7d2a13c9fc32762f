"""HGEMM-1000 benchmark: sizes, calls to NVIDIA's libraries, tables."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks.hgemm import __main__ as hgemm
from benchmarks.hgemm import cublas, cublaslt
from benchmarks.hgemm import table as hgemm_table
from benchmarks.shared import bundled, measuring

NN, TN = cublas.ProtocolLayout.NN, cublas.ProtocolLayout.TN
METHODS = [
    f"{name}-{one}"
    for name in ("torch", "cublas", "lt-heuristic", "lt-tuned")
    for one in ("nn", "tn")
]


def test_all_thousand_sizes_come_once_and_a_sample_is_their_beginning() -> None:
    every = hgemm_table.sizes()
    assert len(set(every)) == 1000
    assert {size.m for size in every} == {size.k for size in every} == set(hgemm_table.EXTENTS)
    sample = hgemm_table.sizes(100)
    assert sample == every[:100] == hgemm_table.sizes(100)
    assert [size.key for size in sample[:2]] == ["4096_2048_1024", "1024_64_128"]
    assert min(size.log2 for size in sample) < 24 < 38 < max(size.log2 for size in sample)


def test_heuristic_result_lies_as_the_header_says() -> None:
    result = cublaslt.HeuristicResult
    offsets = {name: getattr(result, name).offset for name, _ in result._fields_}
    assert offsets == {
        "algo": 0, "workspaceSize": 64, "state": 72, "wavesCount": 76, "reserved": 80
    }  # fmt: skip
    assert ctypes.sizeof(result) == 96


def header() -> Path | None:
    """Reads a header from an installed cuBLASLt."""
    return next(
        (path for place in sys.path for path in Path(place).glob("nvidia/cu*/include/cublasLt.h")),
        None,
    )


@pytest.mark.skipif(header() is None, reason="no nvidia-cublas is installed")
def test_values_are_those_of_the_installed_headers() -> None:
    found = header()
    assert found is not None
    names = ("cublasLt.h", "cublas_api.h", "library_types.h")
    text = "".join((found.parent / name).read_text(errors="replace") for name in names)
    for module in (cublas, cublaslt):
        for name, value in vars(module).items():
            if name.startswith(("CUBLAS", "CUDA_R")):
                assert re.search(rf"\b{name}\s*=\s*{value}\b", text), name


def test_a_library_that_is_not_loaded_is_named() -> None:
    with pytest.raises(click.ClickException, match=r"has loaded no libnothing\.so"):
        cublas.loaded_library("libnothing.so")
    assert cublas.loaded_library("libc.so")._name.startswith("/")


def entry(times: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """Builds a size's entry from nanoseconds by method, equal in both modes."""
    kept = {name: [time, time, time, time] for name, time in times.items()}
    made = {"offline": kept, "server": kept, "algorithms": {"nn": 8, "tn": 20}, "inexact": []}
    return {**made, "thrown_out": {}, "basis": {"nn": "declared", "tn": "signature"}, **more}


def test_speedup_is_over_the_fastest_of_a_baseline_in_the_faster_layout() -> None:
    times = dict.fromkeys(METHODS, 1000) | {"cublas-nn": 1200, "ours-nn": 900, "ours-tn": 800}
    one = hgemm_table.SizeTimes.from_json("64_64_64", entry(times))
    assert one.speedup("offline", "torch.matmul max") == pytest.approx(0.25)
    assert one.speedup("offline", "cuBLAS NN") == pytest.approx(1200 / 900 - 1)
    assert one.speedup("offline", "cuBLAS TN") == pytest.approx(0.25)
    assert one.speedup("offline", "cuBLAS max") == pytest.approx(0.25)
    slow = hgemm_table.SizeTimes.from_json(
        "64_64_64", entry(times | {"ours-tn": 2000, "ours-nn": 2000})
    )
    assert slow.speedup("server", "cuBLAS max") == pytest.approx(-0.5)
    assert slow.best_of("server", "cuBLAS max") == 0
    unserved = hgemm_table.SizeTimes.from_json("64_64_64", entry(dict.fromkeys(METHODS, 1000)))
    assert unserved.speedup("offline", "torch.matmul max") == 0
    assert unserved.best_of("offline", "torch.matmul max") == 0


def test_table_has_every_baseline_and_size_and_names_what_went_wrong() -> None:
    times = dict.fromkeys(METHODS, 1000) | {"ours-nn": 800}
    record = {
        "64_64_64": entry(times),
        "16384_16384_16384": entry(
            dict.fromkeys(METHODS, 1000), inexact=["lt-tuned-nn"], thrown_out={"ab" * 32: "wrong"}
        ),
    }
    text = "\n".join(hgemm_table.table(record))
    assert text.count("offline: 2 of 1000 sizes") == text.count("server: 2 of 1000 sizes") == 1
    for name in hgemm_table.BASELINES:
        tn = name.endswith("TN")  # bundled kernels are in NN alone
        row = rf"^{name} +" + (
            r"\+0\.0% +0\.0% +\+0\.0% +\+0\.0% +0%$" if tn
            else r"\+12\.5% +12\.5% +\+12\.5% +\+12\.5% +50%$"
        )  # fmt: skip
        assert len(re.findall(row, text, re.MULTILINE)) == 2, name
    assert re.search(r"^18-20 +offline +1 +\+25\.0%", text, re.MULTILINE)
    assert re.search(r"^39- +server +1 +\+0\.0%", text, re.MULTILINE)
    assert "8 to 20 algorithms, 14 in the mean" in text
    assert "no kernel serves 1 sizes: 16384_16384_16384" in text
    assert "2 declared, 2 signature" in text
    assert "lt-tuned-nn is not exact on zeros and ones at 1 sizes" in text
    assert "THROWN OUT at 16384_16384_16384: abababababab: wrong" in text


class FakePlan:
    """Plan with three algorithms: one cannot run, and the last is fastest."""

    def __enter__(self) -> FakePlan:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def suggestions(self, count: int) -> list[str]:
        assert count == 100
        return ["cannot", "first", "fast"]

    def multiply(self, algo: str, a: Any, b: Any, out: Any) -> None:
        if algo == "cannot":
            raise click.ClickException("status 15")
        out.copy_(a.float() @ b.float())


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock, the GPU's libraries and the bundled kernels."""

    def multiply(_layout: Any, a: Any, b: Any, out: Any) -> None:
        out.copy_(a.float() @ b.float())

    libraries = SimpleNamespace(
        cublas=SimpleNamespace(multiply=multiply),
        lt=SimpleNamespace(plan=lambda *_: FakePlan(), version=lambda: 130100),
    )
    small = [hgemm_table.Size(m=64, n=64 * n, k=64) for n in (1, 2, 3)]

    def draw(m: int, n: int, k: int, layout: Any, dtype: Any) -> Any:
        return measuring.Exact.draw(m, n, k, layout, dtype, device="cpu")

    def clock(nanoseconds: Mapping[str, float]) -> Callable[..., dict[str, list[float]]]:
        def times(ways: Mapping[str, Any], rounds: int, *_: Any) -> dict[str, list[float]]:
            return {name: [nanoseconds.get(name[:-3], 1000.0)] * rounds for name in ways}

        return times

    def exact_ones(ids: list[str], exact: Any) -> Any:
        launches = {id_: (lambda a, b, out: None) for id_ in ids if "wrong" not in id_}
        return bundled.CheckedKernels(
            launches=launches, thrown_out={"wrong" + ids[0][-3:]: "wrong"}
        )

    monkeypatch.setattr(hgemm, "Libraries", lambda: libraries)
    monkeypatch.setattr(hgemm, "sizes", lambda sample: small[:sample])
    monkeypatch.setattr(hgemm, "Arena", lambda dtype, of: measuring.Arena(dtype, of, device="cpu"))
    monkeypatch.setattr(hgemm, "Exact", SimpleNamespace(draw=draw))
    offline = {"good": 500.0, "better": 400.0, "lt-tuned2": 900.0}
    monkeypatch.setattr(hgemm, "offline_ns", clock(offline))
    server = {"good": 600.0, "better": 700.0, "lt-tuned": 800.0}
    monkeypatch.setattr(hgemm, "server_ns", clock(server))
    monkeypatch.setattr(hgemm, "tuned", lambda ways, *_: {name: -int(name) for name in ways})
    monkeypatch.setattr(hgemm, "load_exact", exact_ones)
    monkeypatch.setattr(
        hgemm,
        "ranked_kernels",
        lambda operands, count: (
            [f"{name}-{'nn' if operands[1].is_contiguous() else 'tn'}" for name in KERNELS[:count]],
            "declared",
        ),
    )
    monkeypatch.setattr(
        hgemm, "environment", lambda **libraries: {"gpu": "G", **libraries, "bundles": ["one"]}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)


KERNELS = ("good", "wrong", "better", "never")


@pytest.mark.usefixtures("on_cpu")
def test_measures_a_sample_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "hgemm.json"
    few = ["--candidates", "3", "--rounds", "4", "--requests", "4"]
    arguments = ["measure", str(path), *few]
    done = CliRunner().invoke(hgemm.main, [*arguments, "--sample", "2"])
    assert done.exit_code == 0, done.output
    entries = hgemm.Results.read(path, "hgemm").entries
    assert list(entries) == ["64_64_64", "64_128_64"]
    kept = entries["64_128_64"]
    for mode, best, tuned in (("offline", "better", "lt-tuned2"), ("server", "good", "lt-tuned")):
        assert kept["chosen"][mode] == {
            "ours-nn": f"{best}-nn", "ours-tn": f"{best}-tn",
            "lt-tuned-nn": f"{tuned}-nn", "lt-tuned-tn": f"{tuned}-tn",
        }  # fmt: skip
        assert set(kept["candidates"][mode]["ours-nn"]) == {"good-nn", "better-nn"}
    assert set(kept["offline"]) == set(kept["server"]) == {*METHODS, "ours-nn", "ours-tn"}
    assert kept["offline"]["ours-tn"] == [400, 400, 400, 400]
    assert kept["server"]["ours-tn"] == [600, 600, 600, 600]
    assert kept["server"]["lt-tuned-tn"] == [800, 800, 800, 800]
    assert kept["algorithms"] == {"nn": 2, "tn": 2}
    assert kept["inexact"] == []
    other = tmp_path / "rest.json"
    done = CliRunner().invoke(hgemm.main, ["measure", str(other), "--without", str(path), *few])
    assert done.exit_code == 0, done.output
    rest = hgemm.Results.read(other, "hgemm").entries
    before = path.read_text()
    done = CliRunner().invoke(hgemm.main, [*arguments, "--resume"])
    assert done.exit_code == 0, done.output
    assert done.output.count("3 of 1000 sizes") == 2
    assert path.read_text() != before
    every = hgemm.Results.read(path, "hgemm").entries
    assert list(every) == [*entries, *rest]
    assert len(rest) == 1
    shown = CliRunner().invoke(hgemm.main, ["table", str(path)])
    assert shown.output == path.with_suffix(".txt").read_text()
    refused = CliRunner().invoke(hgemm.main, [*arguments, "--resume", "--gap-ms", "2"])
    assert refused.exit_code == 1
    assert "its settings is" in refused.output


def test_a_wrong_baseline_is_an_error_and_one_that_rounds_is_named() -> None:
    exact = measuring.Exact.draw(8, 8, 64, NN.layout, torch.float16, device="cpu")

    def rounds(a: Any, b: Any, out: Any) -> None:
        out.copy_((a.float() @ b.float()) * 1.001)

    assert hgemm.inexact({"rounds": rounds}, exact) == ["rounds"]
    with pytest.raises(click.ClickException, match="swapped is wrong"):
        hgemm.inexact({"swapped": lambda a, b, out: out.copy_(b.T @ a.T)}, exact)
    assert hgemm.inexact({"right": lambda a, b, out: out.copy_(a @ b)}, exact) == []
