"""benchmarks/gated: its functions, its manifest and its table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.cases import gated_allowed_cases as of_allowed
from benchmarks.cases import gated_quality_cases as of_quality
from benchmarks.gated import __main__ as benchmark
from benchmarks.gated import allowed, quality
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


def test_a_default_mode_table_and_cases_have_each_side() -> None:
    measured = {
        "us": {"stock": 110.0, "with bundles": 105.0, "fused": 100.0},
        "errors": {"stock": [2e-3, 3e-3], "with bundles": [2e-3, 3e-3], "fused": [1e-3, 2e-3]},
    }
    entries = {"llama-3.1-8b m16": measured}
    *_, row = allowed.table(entries)
    assert row.split()[1:7] == ["16", "110.0", "105.0", "100.0", "1.100", "1.050"]
    found = {
        (case.name, case.baseline and case.baseline.name): case for case in of_allowed(entries)
    }
    assert found["llama-3.1-8b m16/fused", "stock"].figure == 100
    assert found["llama-3.1-8b m16/error of MLP/fused", None].figure == 2e-3


def test_roundings_differ_as_their_names_say() -> None:
    torch.manual_seed(0)
    x, gates, ups = (quality.rounded(torch.randn(32, 64)) for _ in range(3))
    errors = quality.Errors()
    errors.add(x, gates, ups)
    once, twice, eager = map(errors.relative, quality.WAYS)
    assert 0 < once < twice < eager < 0.01
    product = functional.linear(x, torch.cat((gates, ups)))
    stock = functional.silu(product[:, :32].bfloat16().float())
    stock = (stock * product[:, 32:].bfloat16().float()).bfloat16().float()
    torch.testing.assert_close(quality.gated("twice")(x, gates, ups), stock, rtol=0, atol=0)


def test_a_small_models_table_and_cases_compare_with_two_roundings() -> None:
    def measured(perplexity: float, difference: list[float] | None) -> dict[str, Any]:
        return {
            "perplexity": perplexity,
            "divergence": 1e-4,
            "equal": 0.99,
            "over_twice": difference,
            "error": 1e-3,
        }

    entries = {
        "fp32": {**measured(9.9, [-0.01, 0.001]), "error": None},
        "once": measured(10.0, [0.001, 0.002]),
        "twice": measured(10.1, None),
    }
    assert len(list(quality.table(entries))) == 4
    cases = {case.name: case for case in of_quality(entries)}
    once = cases["smollm2-135m/once/perplexity"]
    assert (once.figure, once.noise) == (10.0, 0.002)
    assert once.baseline is not None
    assert once.baseline.value == 10.1
    assert cases["smollm2-135m/twice/error of gated values"].figure == 1e-3
    assert "smollm2-135m/fp32/divergence" not in cases
