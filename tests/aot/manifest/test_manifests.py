"""The manifests that ship: they load, and cover every GEMM of their models.

What a model runs is computed from its config, as `nvgemm_aot.manifest.models` reads it, which other
tests compare with transformers. Those of dense models are compared in test_manifest_from_config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.models import FAMILIES
from nvgemm_aot.manifest.models.gemm import ModelGemm
from nvgemm_aot.manifest.models.tensor_parallel import share
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from repository import ROOT, TESTS

DIRECTORY = ROOT / "manifests"
FILES = sorted(DIRECTORY.glob("*.yaml"))

EXPERTS = ("gpt-oss-20b", "mixtral-8x7b", "qwen3-30b-a3b")
"""Configs in tests/data/configs whose experts have a manifest of their own."""

DENSE = ("llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "qwen3-32b")
TOKENS = [2**power for power in range(14)]


def load(name: str) -> Manifest:
    return load_manifest(DIRECTORY / f"{name}.yaml")


def keys(manifest: Manifest) -> list[str]:
    return [declared.problem.key for declared in manifest.declared]


def test_every_model_and_the_quickstart_ship() -> None:
    experts = {f"{model}-experts" for model in EXPERTS}
    assert {path.stem for path in FILES} == {
        *DENSE, *SOURCES, *experts, "hgemm-1000", "quickstart"
    }  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loads_under_its_own_name(path: Path) -> None:
    manifest = load_manifest(path)
    assert manifest.name == path.stem
    assert manifest.description.endswith(".")
    assert len(manifest.description) <= 100


# By manifest: the config in tests/data/configs that it is of, and what differs from it.
SOURCES: dict[str, tuple[str, dict[str, int]]] = {
    "llama-3.1-8b-nvfp4": ("llama-3.1-8b", {}),
    "llama-3.1-8b-mxfp8": ("llama-3.1-8b", {}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "gpt-oss-120b": ("gpt-oss-20b", {"num_local_experts": 128, "num_hidden_layers": 36}),
}


def config(name: str) -> dict[str, Any]:
    stem, changes = SOURCES[name]
    path = TESTS / "data" / "configs" / f"{stem}.json"
    return {**json.loads(path.read_text()), **changes}


def gemms(name: str, ranks: int = 1) -> list[ModelGemm]:
    """What one of a model's ranks computes, fused and unfused, as its family reads its config."""
    family = FAMILIES[config(name)["model_type"]].model_validate(config(name))
    projections = list(family.projections())
    return [gemm for fused in (False, True) for gemm in share(projections, ranks, fused=fused)]


def dense(name: str, ranks: int = 1) -> set[tuple[int, int]]:
    """(out features, in features) of every Linear that each token passes through."""
    return {(g.n, g.k) for g in gemms(name, ranks) if g.routing is None and not g.unserved}


def routed(name: str) -> set[tuple[int, int]]:
    """(out features, in features) of an expert's GEMMs, on one GPU."""
    return {(gemm.n, gemm.k) for gemm in gemms(name) if gemm.routing is not None}


def expected(signature: str, ms: Iterable[int], nks: set[tuple[int, int]], lead: str = "") -> set:
    return {f"{signature}/{lead}m{m}n{n}k{k}" for m in ms for n, k in nks}


BF16 = "mm/tn/bf16xbf16/fp32/bf16"
FP16 = "mm/tn/fp16xfp16/fp32/fp16"
FP8 = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16"
FP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16"


@pytest.mark.parametrize(("recipe", "signature"), [("nvfp4", FP4), ("mxfp8", FP8)])
def test_llama_is_block_scaled_but_for_its_head(recipe: str, signature: str) -> None:
    scales = {"nvfp4": "e4m3_1x16", "mxfp8": "e8m0_1x32"}[recipe]
    name = f"llama-3.1-8b-{recipe}"
    vocabulary = (config(name)["vocab_size"], config(name)["hidden_size"])
    layers = expected(f"{signature}/{scales}", TOKENS, dense(name) - {vocabulary})
    assert set(keys(load(name))) == layers | expected(BF16, TOKENS, {vocabulary})


def test_qwen_declares_its_experts_as_grouped() -> None:
    name = "qwen3-30b-a3b"
    experts, chosen = config(name)["num_experts"], config(name)["num_experts_per_tok"]
    rows = [chosen * tokens for tokens in TOKENS]
    for_all = {
        dtype: expected(dtype, TOKENS, dense(name))
        | expected(dtype.replace("mm/", "grouped_mm/", 1), rows, routed(name), f"g{experts}")
        for dtype in (BF16, FP16)
    }
    assert set(keys(load(name))) == for_all[BF16] | for_all[FP16]


def test_deepseek_is_declared_whole_and_as_one_of_eight_ranks() -> None:
    name = "deepseek-v3"
    linears = dense(name) | dense(name, 8)
    wanted = set()
    for signature in (BF16, f"{FP8}/e8m0_1x32", f"{FP8}/fp32_row"):
        wanted |= expected(signature, TOKENS, linears)
    chosen, experts = config(name)["num_experts_per_tok"], config(name)["n_routed_experts"]
    for signature in (BF16, FP8):
        grouped = signature.replace("mm/", "grouped_mm/", 1)
        for ranks in (1, 8):
            rows = [chosen * tokens // ranks for tokens in TOKENS]
            wanted |= expected(grouped, rows, routed(name), f"g{experts // ranks}")
    assert set(keys(load(name))) == wanted


def test_gpt_oss_has_biases_and_experts_in_mxfp4() -> None:
    name = "gpt-oss-120b"
    biased = {(gemm.n, gemm.k) for gemm in gemms(name) if gemm.biased and gemm.routing is None}
    experts, chosen = config(name)["num_local_experts"], config(name)["num_experts_per_tok"]
    grouped = BF16.replace("mm/", "grouped_mm/", 1)
    rows = [chosen * tokens for tokens in TOKENS]
    assert set(keys(load(name))) == (
        expected(f"{BF16}/bias", TOKENS, biased)
        | expected(BF16, TOKENS, dense(name) - biased)
        | expected(f"{FP4}/e8m0_1x32", TOKENS, routed(name))
        | expected(grouped, rows, routed(name), f"g{experts}")
    )


def test_hgemm_is_every_size_in_both_layouts() -> None:
    sizes = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384]
    nks = {(n, k) for n in sizes for k in sizes}
    manifest = load("hgemm-1000")
    assert set(keys(manifest)) == {
        key
        for layout in ("tt", "tn")
        for key in expected(f"mm/{layout}/fp16xfp16/fp32/fp16", sizes, nks)
    }
    assert len(manifest.declared) == 2000
    assert {declared.candidates for declared in manifest.declared} == {4}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_what_has_no_scales_is_for_hopper_too(path: Path) -> None:
    manifest = load(path.stem)
    targets = [target.arch for target in manifest.bundle_targets]
    scaled = any(one.problem.signature.scales is not None for one in manifest.declared)
    for_blackwell = scaled or path.stem == "gpt-oss-120b"  # its experts are in MXFP4
    assert targets == (["sm_100f"] if for_blackwell else ["sm_100f", "sm_90a"])


def test_the_readme_lists_every_manifest_with_its_number_of_problems() -> None:
    text = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.-]+)\.yaml` \| ([\d,]+) \|", text, re.MULTILINE)
    counted = {path.stem: len(load_manifest(path).declared) for path in FILES}
    assert {name: int(count.replace(",", "")) for name, count in listed} == counted


def test_quickstart_is_small_and_has_every_kind_of_gemm() -> None:
    manifest = load("quickstart")
    forward = {
        f"mm/tn/bf16xbf16/fp32/bf16/m{m}n{n}k{k}"
        for m in (1, 16, 64)
        for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    }
    backward = {
        "mm/tt/bf16xbf16/fp32/bf16/m2048n4096k4096",
        "mm/nt/bf16xbf16/fp32/bf16/m4096n4096k2048",
    }
    batched = {"bmm/tn/bf16xbf16/fp32/bf16/b32m512n512k128"}
    assert set(keys(manifest)) == forward | backward | batched
    assert {declared.candidates for declared in manifest.declared} == {4}


def test_examples_of_the_readme_load(tmp_path: Path) -> None:
    text = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(version: .*?)```", text, re.DOTALL)
    assert examples
    for index, example in enumerate(examples):
        path = tmp_path / f"{index}.yaml"
        path.write_text(example, encoding="utf-8")
        assert load_manifest(path).declared


@pytest.mark.parametrize("model", EXPERTS)
def test_experts_of_a_training_step_are_declared_as_from_config_does(
    model: str, tmp_path: Path
) -> None:
    output = tmp_path / "made.yaml"
    made = CliRunner().invoke(
        main,
        [
            *("manifest", "from-config", str(TESTS / "data" / "configs" / f"{model}.json")),
            *("--training", "--gated", "--tokens", "4096,24576", "--target", "sm_90a"),
            *("-o", str(output)),
        ],
    )
    assert made.exit_code == 0, made.output
    experts = {
        entry.problem
        for entry in load_manifest(output).declared
        if entry.problem.signature.op.is_moe
    }
    shipped = load(f"{model}-experts")
    assert {entry.problem for entry in shipped.declared} == experts
