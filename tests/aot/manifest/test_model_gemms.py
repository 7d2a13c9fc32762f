"""The GEMMs read from a config are those that transformers computes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from repository import TESTS

if sys.version_info < (3, 11):
    pytest.skip("transformers needs Python 3.11", allow_module_level=True)

import transformers_gemms
from nvgemm_aot.manifest.config_json import read_model
from nvgemm_aot.manifest.config_manifest import ManifestOptions
from nvgemm_aot.manifest.config_yaml import manifest_yaml
from nvgemm_aot.manifest.from_config import make_manifest
from nvgemm_aot.manifest.models import FAMILIES
from nvgemm_aot.manifest.models.gemm import ModelGemm
from nvgemm_aot.manifest.models.tensor_parallel import share
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.workload.called_gemms import GemmCalls
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.moe_operators import BIAS_COLUMNS
from nvgemm_runtime.gemm.problem import Op, Problem
from nvgemm_runtime.gemm.target import Target

CONFIGS = sorted((TESTS / "data" / "configs").glob("*.json"))

_SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biased, with a head size": {"head_dim": 40, "attention_bias": True, "mlp_bias": True},
    "llama, a key-value head for each": {"num_key_value_heads": None},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 40},
    "qwen3, biased, without a head size": {"attention_bias": True},
    "qwen3_moe": {**_EXPERTS, "head_dim": 40, "num_experts": 8},
    "qwen3_moe, with dense layers": {
        **_EXPERTS,
        "num_experts": 8,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [0, 1, 3, 9],
    },
    "mixtral": {"num_experts_per_tok": 3, "num_local_experts": 8},
    "deepseek_v3": {**_EXPERTS, **_LATENT, "q_lora_rank": 40, "first_k_dense_replace": 1},
    "deepseek_v3, biased, no query latent, all dense": {
        **_EXPERTS,
        **_LATENT,
        "q_lora_rank": None,
        "attention_bias": True,
        "first_k_dense_replace": 9,
    },
    "gpt_oss": {"num_experts_per_tok": 2, "num_local_experts": 8, "head_dim": 24},
    "gpt_oss, without biases at attention": {
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "attention_bias": False,
    },
}
"""Small models of each family: sizes beside those of ``_SMALL``."""


def small(case: str) -> dict[str, Any]:
    return {"model_type": case.partition(",")[0], **_SMALL, **SMALL[case]}


def gemms_of(path: Path) -> list[ModelGemm]:
    """A model's GEMMs on one GPU, as transformers has them: unfused."""
    return list(share(read_model(path).projections, 1, fused=False))


def expected_calls(gemms: list[ModelGemm], tokens: int, *, grouped: bool) -> Counter[str]:
    """How often each GEMM is called where every expert sees equally many tokens."""
    calls: Counter[str] = Counter()
    for gemm in gemms:
        m, n, k, count = tokens, gemm.n, gemm.k, gemm.calls
        if gemm.routing and grouped:
            rows, experts = gemm.routing.experts_per_token * tokens, gemm.routing.experts
            text = f"_grouped_mm of bf16[{rows}, {k}] and bf16[{experts}, {k}, {n}]"
            calls[f"{text} into bf16[{rows}, {n}]"] += count // experts
            continue
        if gemm.routing:
            assert gemm.routing.experts_per_token * tokens % gemm.routing.experts == 0
            m = gemm.routing.tokens_of_one(tokens)
        if gemm.biased:
            calls[f"addmm of bf16[{m}, {k}] and bf16[{k}, {n}] into bf16[{m}, {n}]"] += count
        elif gemm.unserved:
            assert gemm.unserved == "it is computed in fp32"
            calls[f"mm of fp32[{m}, {k}] and fp32[{k}, {n}] into fp32[{m}, {n}]"] += count
        else:
            calls[f"mm/{gemm.layout.value}/bf16xbf16/fp32/bf16/m{m}n{n}k{k}"] += count
    return calls


def recorded_calls(recorded: GemmCalls) -> Counter[str]:
    """What was recorded, without attention itself, which multiplies in batches."""
    calls: Counter[str] = Counter()
    for problem, count in recorded.problems.items():
        if problem.signature.op is not Op.BMM:
            calls[in_words(problem)] += count
    for text, count in recorded.undeclarable.items():
        words = text.partition(":")[0]
        if not words.startswith("bmm of "):
            calls[words] += count
    return calls


def test_every_family_has_a_small_model_and_a_published_one() -> None:
    assert {small(case)["model_type"] for case in SMALL} == set(FAMILIES)
    assert {json.loads(path.read_text())["model_type"] for path in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if "llama" in path.stem else pytest.mark.slow)
        for path in CONFIGS
    ],
)
def test_published_models_call_these_gemms_so_often(path: Path) -> None:
    recorded = transformers_gemms.record_fake(json.loads(path.read_text()), 256)
    assert recorded_calls(recorded) == expected_calls(gemms_of(path), 256, grouped=True)


@pytest.mark.parametrize("case", SMALL)
def test_small_models_call_these_gemms_so_often(case: str, tmp_path: Path) -> None:
    config = small(case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    gemms = gemms_of(path)
    sparse = any(gemm.routing for gemm in gemms)
    recorded = transformers_gemms.record_loop(config, 24, evenly=sparse)
    assert recorded_calls(recorded) == expected_calls(gemms, 24, grouped=False)


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_wherever_routers_send_tokens_experts_differ_in_m_alone(case: str, tmp_path: Path) -> None:
    config = small(case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    routed = [gemm for gemm in gemms_of(path) if gemm.routing]
    recorded = transformers_gemms.record_loop(config, 24, evenly=False).problems
    rows: Counter[tuple[str, int, int]] = Counter()
    uneven = set()
    for problem, count in recorded.items():
        key = (problem.signature.layout.value, problem.n, problem.k)
        rows[key] += problem.m * count
        uneven.add((key, problem.m))
    for gemm in routed:
        assert gemm.routing
        key = (gemm.layout.value, gemm.n, gemm.k)
        # Each layer sends every token to as many experts as are chosen.
        assert rows[key] == 24 * gemm.routing.experts_per_token * (
            gemm.calls // gemm.routing.experts
        )
        assert sum(found == key for found, _ in uneven) > 1


@pytest.mark.parametrize("case", SMALL)
def test_manifest_of_a_saved_model_declares_what_it_calls(case: str, tmp_path: Path) -> None:
    config = small(case)
    path = tmp_path / "config.json"
    path.write_text(transformers_gemms.as_transformers_saves_it(config))
    wanted = ManifestOptions(tokens=(24,), ranks=(1,), targets=(Target(arch="sm_90a"),))
    made = make_manifest(path, wanted, name="small")
    (tmp_path / "small.yaml").write_text(manifest_yaml(made))
    declared = {in_words(d.problem) for d in load_manifest(tmp_path / "small.yaml").declared}
    called = set(recorded_calls(transformers_gemms.record_fake(config, 24)))
    # No operator multiplies fp32.
    assert declared == {words for words in called if not words.startswith("mm of fp32")}


@pytest.mark.parametrize("case", SMALL)
def test_manifest_of_a_training_step_declares_what_it_calls(case: str, tmp_path: Path) -> None:
    config = small(case)
    path = tmp_path / "config.json"
    path.write_text(transformers_gemms.as_transformers_saves_it(config))
    wanted = ManifestOptions(
        tokens=(24,), ranks=(1,), targets=(Target(arch="sm_90a"),), training=True
    )
    (tmp_path / "small.yaml").write_text(manifest_yaml(make_manifest(path, wanted, name="small")))
    declared = {d.problem for d in load_manifest(tmp_path / "small.yaml").declared}
    recorded = transformers_gemms.record_training(config, 24)
    called = {p for p in recorded.problems if p.signature.op is not Op.BMM}
    # transformers adds biases of experts, and sums their gradients, without a product;
    # `nvgemm_runtime.moe` with one.
    sums = {p for p in declared if p.signature.op is Op.K_GROUPED_MM and p.n == BIAS_COLUMNS}
    adds = {p for p in declared if p.signature.op is Op.GROUPED_MM and p.signature.epilogue}
    # It adds the rows of tokens, which transformers does with operators that multiply nothing.
    gathers = {p for p in declared if p.signature.op is Op.GATHERED_MM}
    assert declared - sums - adds - gathers == called
    routed = [gemm for gemm in gemms_of(path) if gemm.routing]
    chosen = {gemm.routing.experts_per_token for gemm in routed if gemm.routing}
    dim = config["hidden_size"]
    hidden = {gemm.k for gemm in routed if gemm.role == "expert down_proj"}
    weighed = {dim, *(min(dim, one) for one in hidden)}
    assert {(p.m, p.n, p.k) for p in gathers} == {
        size for k in chosen for size in ((24, dim, k), *((24 * k, n, 1) for n in weighed))
    }
    assert bool(sums) == bool(adds) == case.startswith("gpt_oss")
    others = {words.partition(" of ")[::2] for words in recorded.undeclarable}
    # No operator multiplies fp32, and attention itself is not declared.
    assert all(op == "bmm" or operands.startswith("fp32") for op, operands in others)


def in_words(problem: Problem) -> str:
    """A declared problem as `expected_calls` spells it."""
    m, n, k = problem.m, problem.n, problem.k
    if problem.signature.op is Op.GROUPED_MM:
        lead = f"_grouped_mm of bf16[{m}, {k}] and bf16[{problem.groups}, {k}, {n}]"
        return f"{lead} into bf16[{m}, {n}]"
    if problem.signature.epilogue is BIAS:
        return f"addmm of bf16[{m}, {k}] and bf16[{k}, {n}] into bf16[{m}, {n}]"
    return problem.key


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_manifest_for_blackwell_declares_groups_and_biases_as_they_are_called(
    path: Path, tmp_path: Path
) -> None:
    made = make_manifest(path, ManifestOptions(tokens=(256,), ranks=(1,)))
    (tmp_path / "made.yaml").write_text(manifest_yaml(made))
    declared = {in_words(d.problem) for d in load_manifest(tmp_path / "made.yaml").declared}
    called = set(expected_calls(gemms_of(path), 256, grouped=True))
    missing = {words.partition(" of ")[0] for words in called - declared}
    # No operator multiplies fp32.
    assert missing == {"deepseek-v3": {"mm"}}.get(path.stem, set())
    assert declared <= called


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_ranks_share_a_model_without_rest(path: Path, ranks: int, fused: bool) -> None:
    projections = list(read_model(path).projections)
    whole = list(share(projections, 1, fused=False))
    shares = list(share(projections, ranks, fused=fused))
    # Ranks hold a part of a weight each, all of it, or copies of one head's part.
    weights = sum(gemm.n * gemm.k * gemm.calls * copies(gemm, ranks) for gemm in whole)
    assert sum(gemm.n * gemm.k * gemm.calls for gemm in shares) * ranks == weights
    assert (len(shares) < len(whole)) == fused


def copies(gemm: ModelGemm, ranks: int) -> int:
    """On how many of the ranks each element of a weight lies."""
    if gemm.split is None:
        return ranks
    heads = gemm.split.heads
    return max(1, ranks // heads.count) if heads and heads.copied else 1
