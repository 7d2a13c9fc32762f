"""Manifests from configs of training steps, expert-parallel ranks, and other libraries' experts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch._subclasses.fake_tensor import FakeTensorMode

import expert_steps
import recorded_gemms
from expert_steps import Experts
from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.config_manifest import ManifestOptions
from nvgemm_aot.manifest.config_yaml import manifest_yaml
from nvgemm_aot.manifest.from_config import make_manifest
from nvgemm_aot.manifest.models.expert_weights import ExpertWeights
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import provider_of
from nvgemm_aot.workload.called_gemms import GemmCalls
from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.problem import Op, Problem
from nvgemm_runtime.gemm.support import unsupported
from nvgemm_runtime.gemm.target import Target
from repository import TESTS

CONFIGS = TESTS / "data" / "configs"
TRANSFORMERS, TORCHTITAN = ExpertWeights


def config(stem: str, **changes: Any) -> dict[str, Any]:
    """A published config, with some keys changed, and without those changed to ...."""
    changed = {**json.loads((CONFIGS / f"{stem}.json").read_text()), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def text_of(directory: Path, content: dict[str, Any], **wanted: Any) -> str:
    path = directory / "model.json"
    path.write_text(json.dumps(content))
    options = {"tokens": (16,), "ranks": (1,), "training": True, **wanted}
    return manifest_yaml(make_manifest(path, ManifestOptions(**options)))


def declared(directory: Path, content: dict[str, Any], **wanted: Any) -> dict[str, Problem]:
    path = directory / "made.yaml"
    path.write_text(text_of(directory, content, **wanted), encoding="ascii")
    return {one.problem.key: one.problem for one in load_manifest(path).declared}


def in_groups(problems: dict[str, Problem]) -> set[str]:
    return {key for key, one in problems.items() if one.signature.op.has_groups}


def refusal(directory: Path, content: dict[str, Any], **wanted: Any) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        text_of(directory, content, **wanted)
    return str(caught.value).replace(f"{directory / 'model.json'}: ", "").splitlines()


_TINY = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
TINY = {
    "mixtral-8x7b": {**_TINY, "intermediate_size": 96, "num_local_experts": 8},
    "qwen3-30b-a3b": {**_TINY, "moe_intermediate_size": 96, "num_experts": 16},
    "gpt-oss-20b": {**_TINY, "intermediate_size": 96, "num_local_experts": 8},
    "deepseek-v3": {**_TINY, "moe_intermediate_size": 96, "n_routed_experts": 16},
}
"""By published config: another size."""

COUNTS = {"mixtral-8x7b": (8, 2), "qwen3-30b-a3b": (16, 8), "gpt-oss-20b": (8, 4),
          "deepseek-v3": (16, 8)}  # fmt: skip
"""Experts, and how many of them a token is sent to."""


def kept(stem: str, library: ExpertWeights) -> str:
    if stem == "gpt-oss-20b":
        return "transposed" if library is TRANSFORMERS else "one"
    return "one" if library is TRANSFORMERS else "pair"


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("library", ExpertWeights)
@pytest.mark.parametrize("stem", TINY)
def test_products_of_experts_are_those_that_a_training_step_calls(
    stem: str, library: ExpertWeights, tp: int, ep: int, tmp_path: Path
) -> None:
    """What `nvgemm_runtime.moe.experts` of these sizes multiplies, forward and backward."""
    made = declared(
        tmp_path, config(stem, **TINY[stem]), ranks=(tp,), expert_ranks=(ep,), experts=(library,)
    )
    experts, chosen = COUNTS[stem]
    sizes = Experts(
        count=experts // ep,
        rows=16 * chosen // (tp if ep > 1 else 1),
        dim=64,
        hidden=96 // (1 if ep > 1 else tp),
        kept=kept(stem, library),
        biased=stem == "gpt-oss-20b",
    )
    with FakeTensorMode(), GemmCalls() as met:
        expert_steps.step(sizes)
    assert not met.undeclarable
    called = {problem.key for problem in met.problems}
    added = {key for key in in_groups(made) if "/add/" in key}
    # The libraries themselves multiply first, and then add biases.
    assert in_groups(made) - added == called | {key.replace("/bias/", "/") for key in called}
    # Of two weights with one input, the second's gradient of that is added to the first's.
    second = f"grouped_mm/tt/bf16xbf16/fp32/bf16/add/g{sizes.count}m{sizes.rows}n64k{sizes.hidden}"
    assert added == ({second} if sizes.kept == "pair" else set())
    assert {key.replace("/add/", "/") for key in added} <= called
    assert met.problems == Counter(
        {Problem.parse(key): n for key, n in expert_steps.problems_of(sizes).items()}
    )


def test_each_linear_has_two_gradients_in_their_layouts(tmp_path: Path) -> None:
    made = declared(tmp_path, config("llama-3.1-8b"), tokens=(16, 4096))
    product = "bf16xbf16/fp32/bf16"
    for tokens in (16, 4096):
        assert {key for key in made if "14336" in key and str(tokens) in key.split("/")[-1]} >= {
            f"mm/tn/{product}/m{tokens}n14336k4096",
            f"mm/tt/{product}/m{tokens}n4096k14336",
            f"mm/nt/{product}/m14336n4096k{tokens}",
        }
    assert Counter(problem.signature.layout.value for problem in made.values()) == {
        "tn": 10,
        "tt": 10,
        "nt": 10,
    }


def test_gradients_of_a_biased_linear_have_no_bias(tmp_path: Path) -> None:
    made = declared(tmp_path, config("gpt-oss-20b"))
    query = {key for key in made if key.startswith("mm/") and "4096" in key and "2880" in key}
    assert query >= {
        "mm/tn/bf16xbf16/fp32/bf16/bias/m16n4096k2880",
        "mm/tt/bf16xbf16/fp32/bf16/m16n2880k4096",
        "mm/nt/bf16xbf16/fp32/bf16/m4096n2880k16",
    }
    assert {key for key in made if "bias" in key and not key.startswith("mm/tn/")} == {
        f"grouped_mm/tt/bf16xbf16/fp32/bf16/bias/g32m64n{n}k2880" for n in (5760, 2880)
    }


def test_without_training_no_gradient_is_declared(tmp_path: Path) -> None:
    made = declared(tmp_path, config("qwen3-30b-a3b"), training=False)
    assert {problem.signature.layout.value for problem in made.values()} == {"tn"}
    assert {problem.signature.op for problem in made.values()} == {Op.MM, Op.GROUPED_MM}
    with_gradients = {*declared(tmp_path, config("qwen3-30b-a3b"))}
    assert set(made) < set(with_gradients)
    gathers = {key for key in with_gradients if key.startswith("gathered_mm/")}
    assert len(with_gradients - gathers) == 3 * len(made)
    assert {key.split("/")[-1] for key in gathers} == {
        "m16n2048k8", "m128n2048k1", "m128n768k1",
    }  # fmt: skip


def test_every_declared_gradient_is_computed_by_some_kernel(tmp_path: Path) -> None:
    for stem in TINY:
        for problem in declared(tmp_path, config(stem), ranks=(1, 8)).values():
            assert unsupported(problem.signature) is None


def test_the_number_of_problems_is_that_of_the_loaded_manifest(tmp_path: Path) -> None:
    """gpt-oss' forward of one library is the gradient of another's."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config("gpt-oss-20b")))
    wanted = ManifestOptions(
        tokens=(16, 64),
        ranks=(1, 2),
        expert_ranks=(1, 8),
        experts=(TORCHTITAN, TRANSFORMERS),
        training=True,
    )
    made = make_manifest(path, wanted)
    (tmp_path / "made.yaml").write_text(manifest_yaml(made))
    assert made.problems == len(load_manifest(tmp_path / "made.yaml").declared)


GATES_OF_EXPERTS = {
    ("qwen3-30b-a3b", TRANSFORMERS): {
        "tn/bf16xbf16/fp32/bf16/swiglu_halves/g128m128n1536k2048",
        "tn/bf16xbf16/fp32/bf16/swiglu_halves_kept/g128m128n1536k2048",
        "tt/bf16xbf16/fp32/bf16/swiglu_halves_gradient/g128m128n768k2048",
        "tt/bf16xbf16/fp32/bf16/swiglu_halves_gradient_sums/g128m128n768k2048",
    },
    # Two products, which `nvgemm_runtime.moe` has stored side by side; that of ups has the gate.
    ("qwen3-30b-a3b", TORCHTITAN): {
        "tn/bf16xbf16/fp32/bf16/swiglu_halves_ups/g128m128n768k2048",
        "tt/bf16xbf16/fp32/bf16/swiglu_halves_gradient/g128m128n768k2048",
        "tt/bf16xbf16/fp32/bf16/swiglu_halves_gradient_sums/g128m128n768k2048",
    },
    ("gpt-oss-20b", TRANSFORMERS): {
        "tt/bf16xbf16/fp32/bf16/swiglu_oai_interleaved/g32m64n5760k2880",
        "tt/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_kept/g32m64n5760k2880",
        "tn/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_gradient/g32m64n2880k2880",
        "tn/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_gradient_sums/g32m64n2880k2880",
    },
    ("gpt-oss-20b", TORCHTITAN): {
        "tn/bf16xbf16/fp32/bf16/swiglu_oai_interleaved/g32m64n5760k2880",
        "tn/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_kept/g32m64n5760k2880",
        "tt/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_gradient/g32m64n2880k2880",
        "tt/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_gradient_sums/g32m64n2880k2880",
    },
}


GATHERED = {
    ("qwen3-30b-a3b", TRANSFORMERS): {
        "tn/bf16xbf16/fp32/bf16/swiglu_halves/g128m128n1536k2048",
        "tn/bf16xbf16/fp32/bf16/swiglu_halves_kept/g128m128n1536k2048",
    },
    ("qwen3-30b-a3b", TORCHTITAN): {
        "tn/bf16xbf16/fp32/bf16/g128m128n768k2048",
        "tn/bf16xbf16/fp32/bf16/swiglu_halves_ups/g128m128n768k2048",
    },
}
"""Up projections whose rows are gathered. gpt-oss' are too wide."""


@pytest.mark.parametrize(("stem", "library"), GATES_OF_EXPERTS)
def test_gates_of_experts_in_training_keep_the_product_and_have_a_gradient(
    stem: str, library: ExpertWeights, tmp_path: Path
) -> None:
    """Beside the products without a gate, which are computed where torch compiles a step."""
    plain = declared(tmp_path, config(stem), experts=(library,))
    gated = declared(tmp_path, config(stem), experts=(library,), gated=True)
    wanted = {f"grouped_mm/{key}" for key in GATES_OF_EXPERTS[stem, library]}
    wanted |= {f"gathered_grouped_mm/{key}" for key in GATHERED.get((stem, library), ())}
    assert set(gated) - set(plain) == wanted
    assert set(plain) < set(gated)
    assert all(unsupported(gated[key].signature) is None for key in wanted)


def test_gates_without_experts_have_no_form_for_training(tmp_path: Path) -> None:
    made = declared(tmp_path, config("qwen3-8b"), gated=True)
    assert {key for key in made if "glu" in key} == {
        "mm/tn/bf16xbf16/fp32/bf16/swiglu_halves/m16n24576k4096"
    }


@pytest.mark.parametrize("library", ExpertWeights)
@pytest.mark.parametrize(("hidden", "is_declared"), [(1024, True), (1032, False)])
def test_rows_of_experts_that_are_not_wide_are_gathered(
    hidden: int, is_declared: bool, library: ExpertWeights, tmp_path: Path
) -> None:
    """Of gates and ups together, 2048 columns at most."""
    content = config("qwen3-30b-a3b", moe_intermediate_size=hidden)
    made = declared(tmp_path, content, gated=True, experts=(library,), training=False)
    gathered = [one for one in made.values() if one.signature.op is Op.GATHERED_GROUPED_MM]
    assert bool(gathered) is is_declared
    width = hidden if library is TORCHTITAN else 2 * hidden
    assert all((one.m, one.n, one.k, one.groups) == (128, width, 2048, 128) for one in gathered)


def test_rows_of_experts_on_several_ranks_are_exchanged_and_not_gathered(tmp_path: Path) -> None:
    wanted = {"gated": True, "ranks": (2,), "expert_ranks": (1, 8)}
    made = declared(tmp_path, config("qwen3-30b-a3b"), **wanted)
    gathered = [one for one in made.values() if one.signature.op is Op.GATHERED_GROUPED_MM]
    assert {(one.groups, one.n) for one in gathered} == {(128, 768)}


def test_gates_of_experts_are_shared_as_their_weights(tmp_path: Path) -> None:
    wanted = {"gated": True, "ranks": (2,), "expert_ranks": (1, 8), "tokens": (4096,)}
    made = declared(tmp_path, config("qwen3-30b-a3b"), **wanted)
    rows = "g{}m{}n{}k2048".format
    assert {key.split("bf16/")[-1] for key in made if "kept" in key or "gradient" in key} == {
        f"swiglu_halves_kept/{rows(128, 32768, 768)}",
        f"swiglu_halves_gradient/{rows(128, 32768, 384)}",
        f"swiglu_halves_gradient_sums/{rows(128, 32768, 384)}",
        f"swiglu_halves_kept/{rows(16, 16384, 1536)}",
        f"swiglu_halves_gradient/{rows(16, 16384, 768)}",
    }


def test_ups_of_two_weights_are_shared_as_their_weights(tmp_path: Path) -> None:
    wanted = {"gated": True, "ranks": (2,), "expert_ranks": (1, 8), "tokens": (4096,)}
    made = declared(tmp_path, config("qwen3-30b-a3b"), experts=(TORCHTITAN,), **wanted)
    rows = "g{}m{}n{}k2048".format
    assert {key.split("bf16/")[-1] for key in made if "glu" in key} == {
        f"swiglu_halves_ups/{rows(128, 32768, 384)}",
        f"swiglu_halves_gradient/{rows(128, 32768, 384)}",
        f"swiglu_halves_gradient_sums/{rows(128, 32768, 384)}",
        f"swiglu_halves_ups/{rows(16, 16384, 768)}",
        f"swiglu_halves_gradient/{rows(16, 16384, 768)}",
    }


GATES_OF_FORWARD = {
    "mixtral-8x7b": {"tn/bf16xbf16/fp32/bf16/swiglu_halves_ups/g8m32n14336k4096"},
    "qwen3-30b-a3b": {"tn/bf16xbf16/fp32/bf16/swiglu_halves_ups/g128m128n768k2048"},
    "deepseek-v3": {"tn/bf16xbf16/fp32/bf16/swiglu_halves_ups/g256m128n2048k7168"},
    # Its weights of gates and ups are one.
    "gpt-oss-20b": {"tn/bf16xbf16/fp32/bf16/swiglu_oai_interleaved/g32m64n5760k2880"},
}


@pytest.mark.parametrize("stem", GATES_OF_FORWARD)
def test_ups_of_two_weights_have_their_gate_without_training_too(stem: str, tmp_path: Path) -> None:
    """Beside the products of gates and of ups alone; without gates, those alone."""
    wanted = {"experts": (TORCHTITAN,), "training": False}
    plain = declared(tmp_path, config(stem), **wanted)
    gated = declared(tmp_path, config(stem), gated=True, **wanted)
    of_experts = {key for key in set(gated) - set(plain) if key.startswith("grouped_mm/")}
    assert of_experts == {f"grouped_mm/{key}" for key in GATES_OF_FORWARD[stem]}
    assert not any("glu" in key for key in plain)
    if stem != "gpt-oss-20b":
        (key,) = of_experts
        assert key.replace("/swiglu_halves_ups/", "/") in plain, "the product of gates"


def test_transformers_experts_have_no_ups_of_their_own(tmp_path: Path) -> None:
    wanted = {"gated": True, "experts": (TRANSFORMERS,)}
    for training in (False, True):
        made = declared(tmp_path, config("mixtral-8x7b"), training=training, **wanted)
        assert any("swiglu_halves" in key for key in made)
        assert not any("_ups" in key for key in made)


def test_comments_say_what_gates_of_training_store(tmp_path: Path) -> None:
    text = text_of(tmp_path, config("qwen3-30b-a3b"), gated=True)
    lead = "all of 128 experts, 8 per token (m = tokens * 8)"
    for comment in (
        f"{lead}, with its gate, storing the product (n counts gates and ups)",
        f"input gradients for {lead}, and for the gate before them (the result has 2 n columns)",
    ):
        assert f"  - comment: {comment}\n" in text
    assert "- [768, 2048] # tp 1: expert down_proj x48\n" in text
    of_two = text_of(tmp_path, config("qwen3-30b-a3b"), gated=True, experts=(TORCHTITAN,))
    ups = f"{lead}, as ups that read the gate's product (the result has 2 n columns)"
    assert (
        f"  - comment: {ups}\n    op: grouped_mm\n    groups: 128\n"
        "    epilogue: swiglu_halves_ups\n    layout: tn\n    m: [128]\n    nk:\n"
        "      - [768, 2048] # tp 1: expert up_proj x48\n\n"
    ) in of_two
    assert (
        "  - comment: sums of each token's rows, for results and gradients of "
        f"{lead.partition(' (')[0]} (m = tokens)\n    op: gathered_mm\n"
        "    layout: tt\n    m: [16]\n    nk:\n      - [2048, 8] # tp 1: expert down_proj x48\n"
    ) in text
    assert (
        f"  - comment: gathering token rows, {lead}, with its gate, storing the "
        "product (n counts gates and ups)\n    op: gathered_grouped_mm\n    groups: 128\n"
    ) in text
    assert "\nproviders:" not in text, "all that come along are asked"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stem", TINY)
def test_a_build_asks_providers_that_have_all_that_is_declared(
    stem: str, gated: bool, tmp_path: Path
) -> None:
    targets = (Target(arch="sm_90a"),)
    text = text_of(tmp_path, config(stem, **TINY[stem]), gated=gated, targets=targets)
    (tmp_path / "made.yaml").write_text(text)
    manifest = load_manifest(tmp_path / "made.yaml")
    provider = provider_of(manifest)
    for declared_one in manifest.declared:
        found = provider.enumerate(declared_one.problem.signature, manifest.targets[0])
        assert found.candidates, (declared_one.problem.key, found.absence)


def test_a_gate_that_no_kernel_keeps_the_product_of_is_left_out(tmp_path: Path) -> None:
    """Halves of rows that are no multiple of 16 bytes."""
    small = config("qwen3-30b-a3b", moe_intermediate_size=100)
    _, left_out = text_of(tmp_path, small, gated=True).split("# Left out, ")
    reason = "which must be a multiple of 8 (16 bytes of bf16)"
    of_two = text_of(tmp_path, small, gated=True, experts=(TORCHTITAN,))
    assert (
        "#   tp 1: expert up_proj x6144 [100, 2048]: out is contiguous along n = 100, " + reason
    ) in of_two.split("# Left out, ")[1].splitlines()
    said = [line for line in left_out.splitlines() if "gate_up" in line or "input gradient" in line]
    assert said == [
        "#   tp 1: expert down_proj, input gradient x6144 [100, 2048]: B is contiguous along "
        f"n = 100, {reason}",
        "#   tp 1: expert gate_up_proj x6144 [200, 2048]: out is contiguous along n / 2 = 100, "
        f"{reason}",
    ]


def test_expert_ranks_have_whole_experts_and_their_share_of_rows(tmp_path: Path) -> None:
    """By hand: DeepSeek-V3, 256 experts, 8 a token; ranks of tensor parallelism share tokens."""
    content = config("deepseek-v3")
    wanted = {"tokens": (3, 4096), "training": False}
    alone = in_groups(declared(tmp_path, content, expert_ranks=(8,), **wanted))
    assert alone == {
        f"grouped_mm/tn/bf16xbf16/fp32/bf16/g32m{rows}n{n}k{k}"
        for rows in (24, 32768)
        for n, k in ((4096, 7168), (7168, 2048))
    }
    both = declared(tmp_path, content, ranks=(16,), expert_ranks=(16,), **wanted)
    assert in_groups(both) == {
        f"grouped_mm/tn/bf16xbf16/fp32/bf16/g16m{rows}n{n}k{k}"
        for rows in (2, 2048)  # 3 * 8 / 16, rounded up
        for n, k in ((4096, 7168), (7168, 2048))
    }
    dense = declared(tmp_path, content, ranks=(16,), **wanted)
    assert set(both) - in_groups(both) == set(dense) - in_groups(dense)


def test_comments_say_which_ranks_and_gradients(tmp_path: Path) -> None:
    content = config("qwen3-30b-a3b")
    text = text_of(tmp_path, content, ranks=(1, 2), expert_ranks=(1, 8))
    assert (
        "description: GEMMs of a qwen3_moe model, tokens 16, tp 1, 2, ep 1, 8, with those of "
        in text
    )
    assert "- [1536, 2048] # tp 1: expert gate_up_proj x48\n" in text
    assert "- [1536, 2048] # ep 8, tp 1: expert gate_up_proj x48\n" in text
    assert (
        "all of 16 experts on one GPU, ep 8, 8 per token (m = tokens * 8 / 2, rounded up)" in text
    )
    assert "  - comment: input gradients for GEMMs that every token uses\n" in text
    assert re.search(
        r"  # weight gradients for all of 16 experts on one GPU, ep 8, 8 per token "
        r"\(k = tokens \* 8\)\n  # ep 8, tp 1: expert gate_up_proj x48\n"
        r"  - \{op: k_grouped_mm, layout: nt, groups: 16, m: 1536, n: 2048, k: \[128\]\}\n",
        text,
    )


def test_what_is_left_out_names_the_gradient(tmp_path: Path) -> None:
    _, left_out = text_of(tmp_path, config("deepseek-v3")).split("# Left out, ")
    assert left_out.splitlines()[1:] == [
        "#   tp 1: router x58 [256, 7168]: it is computed in fp32",
        "#   tp 1: router, input gradient x58 [7168, 256]: it is computed in fp32",
        "#   tp 1: router, weight gradient x58 [256, 7168]: it is computed in fp32",
    ]


REFUSED = {
    "ranks that do not divide experts": (
        config("deepseek-v3"),
        {"expert_ranks": (1, 3, 8, 512)},
        ["n_routed_experts: found 256; allowed with ep 3: a multiple of 3",
         "n_routed_experts: found 256; allowed with ep 512: a multiple of 512"],
    ),
    "expert ranks that tensor-parallel ones do not divide": (
        config("qwen3-30b-a3b"),
        {"ranks": (1, 4, 8), "expert_ranks": (4,)},
        ["ep: found 4; allowed with tp 8: 1 or a multiple of 8, so that each rank has whole "
         "experts"],
    ),
    "a model without experts": (
        config("llama-3.1-8b"),
        {"expert_ranks": (1, 2)},
        ["ep: found 2; allowed: 1, because llama has no experts; omit --ep"],
    ),
    "no number of experts": (
        config("mixtral-8x7b", num_local_experts=...),
        {},
        ["num_local_experts: found no such key, which mixtral requires"],
    ),
    "quantized": (
        config("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"}),
        {},
        ["quantization_config: found mxfp4; allowed with --training: no such key, because no "
         "operator computes gradients of quantized weights; to declare training without "
         "quantization, remove the key from a copy of the config"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    content, wanted, lines = REFUSED[case]
    assert refusal(tmp_path, content, **wanted) == lines


def test_a_quantized_model_is_declared_without_training(tmp_path: Path) -> None:
    content = config("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    assert declared(tmp_path, content, training=False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["manifest", "from-config", *map(str, arguments)])


def test_the_command_takes_the_options(tmp_path: Path) -> None:
    options = ["--training", "--ep", "1,8", "--experts", "torchtitan", "--experts", "torchtitan"]
    out = tmp_path / "made.yaml"
    result = run(CONFIGS / "mixtral-8x7b.json", "--tokens", 64, *options, "-o", out)
    assert result.exit_code == 0, result.output
    made = [one.problem for one in load_manifest(out).declared]
    assert {one.groups for one in made} == {1, 8}
    assert {one.signature.op for one in made} == {
        Op.MM, Op.GROUPED_MM, Op.K_GROUPED_MM, Op.GATHERED_MM,
    }  # fmt: skip
    assert {one.n for one in made if one.signature.key.startswith("grouped_mm/tn")} == {14336, 4096}
    assert result.stdout == f"{out}: written, {len(made)} problems\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--tokens", "0", "--training"], 2, "found '0'; allowed: integers in 1..2147483647"),
        (["--training"], 2, "Missing option '--tokens'"),
        (["--tokens", "1", "--ep", "0"], 2, "found '0'"),
        (["--tokens", "1", "--ep", "5"], 10, "num_local_experts: found 8; allowed with ep 5"),
        (["--tokens", "1", "--experts", "vllm"], 2, "'vllm' is not one of"),
    ],
)
def test_wrong_arguments_are_said(arguments: list[str], code: int, says: str) -> None:
    result = run(CONFIGS / "mixtral-8x7b.json", *arguments)
    assert result.exit_code == code
    assert says in result.stderr
    assert not result.stdout


def test_coverage_knows_every_problem_of_a_training_step(tmp_path: Path) -> None:
    problems = declared(tmp_path, config("gpt-oss-20b", **TINY["gpt-oss-20b"]))
    manifest = str(tmp_path / "made.yaml")
    arguments = ["--target", "sm_90a", "--declared-only", "--fail-under", "100", "--json"]
    whole = recorded_gemms.write(
        tmp_path / "whole.nvgemm", recorded_gemms.content(*problems.values(), arch="sm_90a")
    )
    result = CliRunner().invoke(main, ["coverage", manifest, str(whole), *arguments])
    assert result.exit_code == 0, result.output
    forward = [one for one in problems.values() if one.signature.op is not Op.K_GROUPED_MM]
    part = recorded_gemms.write(
        tmp_path / "part.nvgemm", recorded_gemms.content(*forward, arch="sm_90a")
    )
    result = CliRunner().invoke(main, ["coverage", manifest, str(part), *arguments])
    assert result.exit_code == 23
    for target in json.loads(result.stdout)["targets"]:
        missed = {one["gemm"] for one in target["gemms"] if one["status"] == "missed"}
        assert missed == {key for key in problems if key.startswith("k_grouped_mm")}
