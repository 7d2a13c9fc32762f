"""GEMMs of models that no family's module reads: transformers' models under fake tensors."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from repository import TESTS

if sys.version_info < (3, 11):
    pytest.skip("transformers needs Python 3.11", allow_module_level=True)

from nvgemm_aot.manifest.config_json import read_model
from nvgemm_aot.manifest.config_manifest import ConfigManifest, ManifestOptions
from nvgemm_aot.manifest.config_yaml import manifest_yaml
from nvgemm_aot.manifest.from_config import make_manifest
from nvgemm_aot.manifest.models import FAMILIES
from nvgemm_aot.manifest.models.gemm import Fusible, ModelGemm, Part
from nvgemm_aot.manifest.models.model import Model
from nvgemm_aot.manifest.models.tensor_parallel import share
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.manifest.traced import traced_model
from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import Layout, Op
from nvgemm_runtime.gemm.target import Target
from traced_models import WEIGHTS

CONFIGS = TESTS / "data" / "configs"
TRACED = CONFIGS / "traced"
FEW = {"qwen3-next-80b-a3b": 4}
"""Layers of the models that are run by default, 2 where not named: one of each kind."""


def config(stem: str, *, whole: bool = False, **changes: Any) -> dict[str, Any]:
    """A published config, with few layers unless it is to be ``whole``."""
    data = json.loads((TRACED / f"{stem}.json").read_text()) | changes
    layers = None if whole else FEW.get(stem, 2)
    for part in (data, *(value for value in data.values() if isinstance(value, dict))):
        for key in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
            if layers is not None and key in part:
                part[key] = min(part[key], layers)
    return data


def read(directory: Path, content: dict[str, Any]) -> Model:
    path = directory / "config.json"
    path.write_text(json.dumps(content))
    return read_model(path)


@functools.lru_cache
def model_of(stem: str) -> Model:
    """A published model with few layers."""
    with tempfile.TemporaryDirectory() as directory:
        return read(Path(directory), config(stem))


def gemms(model: Model, ranks: int = 1, *, fused: bool = False, ep: int = 1) -> list[ModelGemm]:
    return list(share(model.projections, ranks, fused=fused, expert_ranks=ep))


def make(directory: Path, content: dict[str, Any], **wanted: Any) -> ConfigManifest:
    path = directory / "config.json"
    path.write_text(json.dumps(content))
    given = {"tokens": (16,), "ranks": (1,), "targets": (Target(arch="sm_90a"),), **wanted}
    return make_manifest(path, ManifestOptions(**given), name="made")


def load(directory: Path, made: ConfigManifest) -> Manifest:
    path = directory / "made.yaml"
    path.write_text(manifest_yaml(made), encoding="ascii")
    return load_manifest(path)


# Models that other tests read, too; the slow tests have all of them, whole.
@pytest.mark.parametrize(
    "stem",
    [
        "gemma-3-4b", "mistral-small-3.1-24b", "qwen2-7b", "qwen1.5-moe-a2.7b", "phi-3-mini",
        "olmoe-1b-7b", "llama-4-scout", "deepseek-v2-lite", "starcoder2-7b", "gpt-neox-20b",
        "siglip-so400m-384", "whisper-large-v3",
    ],
)  # fmt: skip
def test_weights_are_those_counted_by_hand(stem: str) -> None:
    found = {gemm.role: (gemm.n, gemm.k) for gemm in gemms(model_of(stem))}
    assert found == {name: (n, k) for name, (n, k, _) in WEIGHTS[stem].items()}


UNEVEN = (
    "deepseek-v2-lite",
    "gemma-3-4b",
    "glm-4.5-air",
    "llama-4-scout",
    "qwen3-next-80b-a3b",
    "whisper-large-v3",
)
"""Models of which not all layers are alike."""


@pytest.mark.slow
@pytest.mark.parametrize("stem", UNEVEN)
def test_published_models_call_each_weight_so_often(stem: str, tmp_path: Path) -> None:
    found = {}
    for gemm in gemms(read(tmp_path, config(stem, whole=True))):
        experts = gemm.routing.experts if gemm.routing else 1
        found[gemm.role] = (gemm.n, gemm.k, gemm.calls // experts)
    assert found == WEIGHTS[stem]


def test_every_config_has_its_count() -> None:
    assert {path.stem for path in TRACED.glob("*.json")} == set(WEIGHTS)


# By hand: of one of 8 ranks, or of `RANKS`, by the plan.
RANK: dict[str, dict[str, tuple[int, int]]] = {
    "qwen2-7b": {  # 28 heads are no multiple of 8, so of one of 4: 7 heads, one key-value head
        "q_proj": (7 * 128, 3584),
        "k_proj": (128, 3584),
        "o_proj": (3584, 7 * 128),
        "gate_proj": (4736, 3584),
        "down_proj": (3584, 4736),
        "lm_head": (38016, 3584),
    },
    "phi-3-mini": {
        "qkv_proj": (1152, 3072),
        "o_proj": (3072, 384),
        "gate_up_proj": (2048, 3072),
        "down_proj": (3072, 1024),
        "lm_head": (4008, 3072),
    },
    "olmoe-1b-7b": {
        "q_proj": (256, 2048),
        "o_proj": (2048, 256),
        "gate": (64, 2048),
        "gate_up_proj": (256, 2048),
        "down_proj": (2048, 128),
        "lm_head": (6288, 2048),
    },
    "deepseek-v2-lite": {
        "q_proj": (2 * 192, 2048),
        "kv_a_proj_with_mqa": (576, 2048),
        "kv_b_proj": (2 * 256, 512),
        "o_proj": (2048, 2 * 128),
        "lm_head": (12800, 2048),
    },
    "gpt-neox-20b": {
        "query_key_value": (2304, 6144),
        "dense": (6144, 768),
        "dense_h_to_4h": (3072, 6144),
        "dense_4h_to_h": (6144, 3072),
    },
    "starcoder2-7b": {  # one of 4: 9 heads
        "q_proj": (9 * 128, 4608),
        "k_proj": (128, 4608),
        "o_proj": (4608, 9 * 128),
        "c_fc": (4608, 4608),
        "c_proj": (4608, 4608),
    },
}
RANKS = {"qwen2-7b": 4, "starcoder2-7b": 4}


@pytest.mark.parametrize("stem", RANK)
def test_ranks_divide_weights_by_the_models_plan(stem: str, tmp_path: Path) -> None:
    found = {}
    for gemm in gemms(model_of(stem), RANKS.get(stem, 8)):
        found[gemm.role.rpartition(".")[2]] = (gemm.n, gemm.k)
    assert {name: found[name] for name in RANK[stem]} == RANK[stem]


def test_ranks_divide_row_major_experts_as_their_plan_says(tmp_path: Path) -> None:
    found = {gemm.role: gemm for gemm in gemms(model_of("llama-4-scout"), 8)}
    experts = "language_model.model.layers.*.feed_forward.experts."
    into, out_of = found[f"{experts}gate_up_proj"], found[f"{experts}down_proj"]
    assert (into.n, into.k, into.batch, into.layout) == (2048, 5120, 16, Layout.TT)
    assert (out_of.n, out_of.k, out_of.batch, out_of.layout) == (5120, 1024, 16, Layout.TT)


def test_ranks_divide_models_without_a_plan_by_the_names_of_weights(tmp_path: Path) -> None:
    found = {gemm.role: gemm for gemm in gemms(model_of("siglip-so400m-384"), 8)}
    layer = "vision_model.encoder.layers.*."
    sizes = {
        name: (found[f"{layer}{name}"].n, found[f"{layer}{name}"].k)
        for name in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
    }
    assert sizes == {
        "self_attn.q_proj": (144, 1152),
        "self_attn.out_proj": (1152, 144),
        "mlp.fc1": (538, 1152),
        "mlp.fc2": (1152, 538),
    }


# Published sizes with 2 layers. Each rank needs the k of what it gives to the other ranks' sum.
@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        (
            {"model_type": "bloom", "hidden_size": 4096, "n_layer": 2, "n_head": 32},
            {"query_key_value": (1536, 4096), "self_attention.dense": (4096, 512)},
        ),
        (  # 128 query heads, 8 key-value heads in the same weight
            {
                "model_type": "falcon",
                "hidden_size": 8192,
                "num_hidden_layers": 2,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "new_decoder_architecture": True,
            },
            {"query_key_value": (1152, 8192), "self_attention.dense": (8192, 1024)},
        ),
        (  # one key-value head, which every rank has
            {
                "model_type": "gpt_bigcode",
                "n_embd": 6144,
                "n_inner": 24576,
                "n_layer": 2,
                "n_head": 48,
                "multi_query": True,
            },
            {"c_attn": (6 * 128 + 2 * 128, 6144), "attn.c_proj": (6144, 768)},
        ),
        (
            {
                "model_type": "bert",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 2,
                "num_attention_heads": 16,
            },
            {
                "attention.self.key": (128, 1024),
                "attention.output.dense": (1024, 128),
                "intermediate.dense": (512, 1024),
                "*.output.dense": (1024, 512),
                "transform.dense": (1024, 1024),
            },
        ),
        (
            {
                "model_type": "t5",
                "d_model": 1024,
                "d_kv": 64,
                "d_ff": 4096,
                "num_layers": 2,
                "num_heads": 16,
            },
            {"SelfAttention.q": (128, 1024), "EncDecAttention.o": (1024, 128)},
        ),
        (
            {
                "model_type": "mamba",
                "hidden_size": 2560,
                "num_hidden_layers": 2,
                "time_step_rank": 160,
            },
            {"in_proj": (1280, 2560), "x_proj": (192, 640), "out_proj": (2560, 640)},
        ),
    ],
    ids=lambda value: value.get("model_type", "sizes"),
)
def test_what_ranks_divide_before_a_sum_they_divide_behind_it(
    content: dict[str, Any], sizes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    found = {gemm.role: (gemm.n, gemm.k) for gemm in gemms(read(tmp_path, content), 8)}
    for end, pair in sizes.items():
        assert {found[role] for role in found if role.endswith(end)} >= {pair}
    roles = [role for role in found if role.endswith(tuple(sizes))]
    assert {found[role] for role in roles} == set(sizes.values())


def test_keys_and_values_beside_queries_are_shared_or_copied_whole(tmp_path: Path) -> None:
    content = {
        "model_type": "falcon",
        "hidden_size": 3072,
        "num_hidden_layers": 1,
        "num_attention_heads": 48,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }
    made = gemms(read(tmp_path, content), 16)
    assert next((g.n, g.k) for g in made if g.role.endswith("query_key_value")) == (320, 3072)
    with pytest.raises(ManifestError, match="key-value heads: found 8; allowed with tp 3: a mult"):
        make(tmp_path, content, ranks=(3,))
    with pytest.raises(ManifestError, match=r"heads: found 48; allowed with tp 7: .*7$") as error:
        make(tmp_path, content, ranks=(7,))
    assert "\n" not in str(error.value)


def test_weights_that_a_plan_leaves_out_are_divided_where_ranks_can(tmp_path: Path) -> None:
    found = {gemm.role: (gemm.n, gemm.k) for gemm in gemms(model_of("qwen1.5-moe-a2.7b"), 8)}
    assert found["model.layers.*.mlp.shared_expert.gate_proj"] == (704, 2048)
    assert found["model.layers.*.mlp.shared_expert_gate"] == (1, 2048)
    # The text has 32 heads and a plan, the tower 16 and none.
    found = {gemm.role: (gemm.n, gemm.k) for gemm in gemms(model_of("mistral-small-3.1-24b"), 32)}
    tower = "model.vision_tower.transformer.layers.*."
    assert found[f"{tower}attention.q_proj"] == (1024, 1024)
    assert found[f"{tower}feed_forward.gate_proj"] == (128, 1024)
    assert found["model.language_model.layers.*.self_attn.q_proj"] == (128, 5120)


def test_ranks_that_cannot_share_heads_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="num_attention_heads: found 20; allowed with tp 8"):
        make(tmp_path, config("whisper-large-v3"), ranks=(8,))
    with pytest.raises(ManifestError, match="num_experts: found 60; allowed with ep 8"):
        make(tmp_path, config("qwen1.5-moe-a2.7b"), expert_ranks=(8,))
    with pytest.raises(
        ManifestError, match="ep: found 2; allowed: 1, because qwen2 has no experts"
    ):
        make(tmp_path, config("qwen2-7b"), expert_ranks=(2,))


def test_expert_ranks_have_whole_experts(tmp_path: Path) -> None:
    olmoe = gemms(model_of("olmoe-1b-7b"), ep=8)
    routed = {(gemm.n, gemm.k, gemm.routing.experts) for gemm in olmoe if gemm.routing}
    assert routed == {(2048, 2048, 8), (2048, 1024, 8)}
    llama = gemms(model_of("llama-4-scout"), ep=8)
    assert {(gemm.n, gemm.k, gemm.batch) for gemm in llama if gemm.batch > 1} == {
        (16384, 5120, 2),
        (5120, 8192, 2),
    }


def test_weights_of_one_input_are_fused_as_engines_do(tmp_path: Path) -> None:
    def fused(stem: str) -> dict[str, tuple[int, int]]:
        model = model_of(stem)
        roles = {one.role for one in model.projections if isinstance(one, Fusible)}
        found = gemms(model, fused=True)
        return {gemm.role: (gemm.n, gemm.k) for gemm in found if gemm.role in roles}

    assert fused("qwen2-7b") == {
        "model.layers.*.self_attn.qkv_proj": (3584 + 2 * 512, 3584),
        "model.layers.*.mlp.gate_up_proj": (2 * 18944, 3584),
    }
    # Queries of the decoder are of its tokens, keys and values of the encoder's.
    assert fused("whisper-large-v3") == {
        "model.encoder.layers.*.self_attn.qkv_proj": (3 * 1280, 1280),
        "model.decoder.layers.*.self_attn.qkv_proj": (3 * 1280, 1280),
        "model.decoder.layers.*.encoder_attn.kv_proj": (2 * 1280, 1280),
    }
    assert fused("phi-3-mini") == {}


def test_rows_are_those_of_tokens_images_and_clips(tmp_path: Path) -> None:
    def rows(stem: str, role: str) -> list[int]:
        found = {gemm.role: gemm.rows for gemm in gemms(model_of(stem))}
        return [found[role].count(tokens, inputs) for tokens, inputs in ((64, 1), (64, 3), (1, 1))]

    assert rows("siglip-so400m-384", "text_model.encoder.layers.*.mlp.fc1") == [64, 64, 1]
    # 384 / 14 patches along each side
    assert rows("siglip-so400m-384", "vision_model.encoder.layers.*.mlp.fc1") == [729, 2187, 729]
    assert rows("siglip-so400m-384", "text_model.head") == [1, 3, 1]
    assert rows("whisper-large-v3", "model.encoder.layers.*.fc1") == [1500, 4500, 1500]
    assert rows("whisper-large-v3", "model.decoder.layers.*.fc1") == [64, 64, 1]
    # 896 / 14 patches along each side, and a quarter of as many tokens
    projector = "model.multi_modal_projector.mm_input_projection_weight"
    assert rows("gemma-3-4b", projector) == [256, 768, 256]


def test_inputs_give_the_rows_of_what_sees_no_tokens(tmp_path: Path) -> None:
    made = make(tmp_path, config("siglip-so400m-384"), tokens=(16, 64), inputs=(1, 4))
    declared = {d.problem.m for d in load(tmp_path, made).declared if d.problem.n == 4304}
    assert declared == {16, 64, 729, 4 * 729, 1, 4}


@pytest.mark.parametrize("stem", ["gemma-3-4b", "olmoe-1b-7b"])
def test_the_implementation_of_attention_changes_nothing(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvgemm_aot.manifest.traced import building

    expected = model_of(stem).projections
    build = building._build

    def with_sdpa(transformers: Any, kind: Any, built: Any) -> Any:
        model = build(transformers, kind, built)
        model.set_attn_implementation("sdpa")
        return model

    monkeypatch.setattr(building, "_build", with_sdpa)
    assert read(tmp_path, config(stem)).projections == expected


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_families_read_from_their_configs_are_what_transformers_runs(path: Path) -> None:
    data = json.loads(path.read_text()) | {"num_hidden_layers": 4}
    family = FAMILIES[data["model_type"]].model_validate(data).to_model(data["model_type"])
    run = traced_model.read_model(path, data, "5", None)
    for fused in (False, True):
        for ranks in (1, 2):
            assert _counts(run, ranks, fused=fused) == _counts(family, ranks, fused=fused)


def _counts(model: Model, ranks: int, *, fused: bool) -> dict[tuple[object, ...], int]:
    """How often a forward pass calls each GEMM, whatever its name."""
    counts: dict[tuple[object, ...], int] = {}
    for gemm in gemms(model, ranks, fused=fused):
        key = (gemm.n, gemm.k, gemm.layout, gemm.biased, gemm.routing, gemm.unserved)
        counts[key] = counts.get(key, 0) + gemm.calls
    return counts


def test_gates_and_routing_of_experts_are_found(tmp_path: Path) -> None:
    found = {gemm.role: gemm for gemm in gemms(model_of("olmoe-1b-7b"))}
    into = found["model.layers.*.mlp.experts.gate_up_proj"]
    assert into.routing is not None
    assert (into.routing.experts, into.routing.experts_per_token) == (64, 8)
    assert into.gated is Epilogue.parse("swiglu_halves")
    assert found["model.layers.*.mlp.gate"].part is Part.ROUTER
    assert found["lm_head"].part is Part.HEAD
    declared = load(tmp_path, make(tmp_path, config("olmoe-1b-7b"), gated=True)).declared
    gated = {d.problem.signature.epilogue for d in declared if d.problem.groups == 64}
    assert gated == {None, Epilogue.parse("swiglu_halves")}


def test_a_training_step_has_the_gradients_of_every_weight(tmp_path: Path) -> None:
    made = make(tmp_path, config("starcoder2-7b"), training=True)
    sizes = {(d.problem.m, d.problem.n, d.problem.k) for d in load(tmp_path, made).declared}
    for n, k, _ in WEIGHTS["starcoder2-7b"].values():
        assert {(16, n, k), (16, k, n), (n, k, 16)} <= sizes
    llama = load(tmp_path, make(tmp_path, config("llama-4-scout"), training=True))
    batched = {
        (d.problem.signature.layout, d.problem.m, d.problem.n, d.problem.k)
        for d in llama.declared
        if d.problem.signature.op is Op.BMM and d.problem.batch == 16
    }
    assert {
        (Layout.TT, 16, 16384, 5120),
        (Layout.TN, 16, 5120, 16384),
        (Layout.NT, 5120, 16384, 16),
    } <= batched


# A loop over experts, each with Linears or slices of one weight: what older models of experts do.
def test_experts_that_a_loop_calls_are_met_whole(tmp_path: Path) -> None:
    content = {
        "model_type": "granitemoe",
        "architectures": ["GraniteMoeForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
    }
    routed = {gemm.role: gemm for gemm in gemms(read(tmp_path, content)) if gemm.routing}
    sizes = {
        (g.n, g.k, g.routing.experts, g.routing.experts_per_token)
        for g in routed.values()
        if g.routing
    }
    assert sizes == {(1024, 1536, 40, 8), (1536, 512, 40, 8)}
    declared = load(tmp_path, make(tmp_path, content)).declared
    assert {d.problem.m for d in declared if d.problem.groups == 40} == {16 * 8}


def test_experts_that_are_slices_of_one_matrix_are_met_whole(tmp_path: Path) -> None:
    content = {
        "model_type": "dbrx",
        "d_model": 256,
        "n_heads": 4,
        "n_layers": 1,
        "vocab_size": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500000, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 256,
            "ffn_hidden_size": 384,
            "moe_num_experts": 16,
            "moe_top_k": 4,
        },
    }
    routed = {gemm.role: gemm for gemm in gemms(read(tmp_path, content), 2) if gemm.routing}
    sizes = {role.rpartition(".")[2]: (g.n, g.k, g.layout) for role, g in routed.items()}
    assert sizes == {
        "w1": (192, 256, Layout.TN),
        "v1": (192, 256, Layout.TN),
        "w2": (256, 192, Layout.TT),
    }
    assert {
        (g.routing.experts, g.routing.experts_per_token) for g in routed.values() if g.routing
    } == {(16, 4)}
