"""benchmarks/gated: its functions, its manifest and its table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.gated import __main__ as benchmark
from benchmarks.shared.summaries import Summary
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_runtime.gemm.problem import Signature
from repository import ROOT


def test_the_manifest_declares_every_size() -> None:
    declared = load_manifest(ROOT / "benchmarks/gated/manifest.yaml").declared
    found = {(p.signature.epilogue, p.m, p.n, p.k) for p in (one.problem for one in declared)}
    wanted = {
        (mlp.epilogue, m, 2 * mlp.half, mlp.hidden)
        for m in benchmark.ROWS
        for mlp in benchmark.MODELS.values()
    }
    assert found == wanted
    keys = {one.problem.signature for one in declared}
    assert all(
        one == Signature.parse(f"mm/tn/bf16xbf16/fp32/bf16/{one.epilogue.name}") for one in keys
    )


@pytest.mark.parametrize("mlp", benchmark.MODELS.values(), ids=list(benchmark.MODELS))
def test_both_forms_compute_the_same(mlp: benchmark.Mlp) -> None:
    x, weight = torch.randn(3, 8), torch.randn(12, 8)
    gate, up = (x @ weight.t()).chunk(2, -1)
    activation = (
        functional.silu
        if "swiglu" in mlp.epilogue.name
        else lambda x: functional.gelu(x, approximate="tanh")
    )
    right = activation(gate) * up
    torch.testing.assert_close(benchmark.one_product(mlp.epilogue)(x, weight), right)
    two: Any = benchmark.two_products(mlp.epilogue)
    torch.testing.assert_close(two(x, weight[:6], weight[6:]), right)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_torch_knows_the_options(mode: str) -> None:
    options = {**benchmark.OPTIONS, "nvgemm_aot_mode": mode}
    compiled = torch.compile(lambda x: x + 1, options=options)
    assert compiled(torch.zeros(1)).item() == 1


def entry(**times_us: int) -> dict[str, Any]:
    def summary(time: int) -> list[int]:
        ns = 1000 * time
        return Summary(choice_ns=ns, report_ns=ns, least_ns=ns, most_ns=ns).to_json()

    return {"times": {name.replace("_", " "): summary(time) for name, time in times_us.items()}}


def test_the_table_holds_the_best_of_each_side_against_each_other() -> None:
    entries = {
        "qwen3-8b m512": entry(
            one_product=120, two_products=110, with_bundles=100, slow=105, quick=88
        ),
        "llama-3.1-8b m1024": entry(one_product=200, two_products=300, with_bundles=200, quick=160),
    }
    lines = list(benchmark.table(entries))
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["llama-3.1-8b", "1024"], ["qwen3-8b", "512"],
    ]  # fmt: skip
    assert lines[2].split() == [
        "qwen3-8b", "512", "110.0", "100.0", "1.100", "88.0", "1.250", "quick",
    ]  # fmt: skip
    assert "1.049 times as fast" in lines[-1]
    assert "best kernel 1.250" in lines[-1]
    assert "least 1.000 and 1.250" in lines[-1]
