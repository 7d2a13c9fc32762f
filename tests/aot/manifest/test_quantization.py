"""Configs of quantized models: what is declared of them is what engines run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.manifest.config_manifest import ManifestOptions
from nvgemm_aot.manifest.config_yaml import manifest_yaml
from nvgemm_aot.manifest.from_config import make_manifest
from nvgemm_aot.manifest.models import quantization as quantization_module
from nvgemm_aot.manifest.models.gemm import ModelGemm
from nvgemm_aot.manifest.models.quantization import modules_of_family, read_quantization
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.gemm.target import Target
from repository import TESTS

CONFIGS = TESTS / "data" / "configs"

HEAD = (128256, 4096)
Q_PROJ, KV_PROJ, MLP, DOWN = (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)
LINEARS = {Q_PROJ, KV_PROJ, MLP, DOWN}

TENSORS, ROWS = "fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor", "fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row"
NVFP4, BF16 = "fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16", "bf16xbf16/fp32/bf16"

STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def group(
    weights: tuple[str, int, str], activations: tuple[str, int, str] | None, **rest: Any
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""

    def said(form: tuple[str, int, str]) -> dict[str, Any]:
        kind, bits, strategy = form
        size = {"group": 128, "tensor_group": 16}.get(strategy)
        return {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": size}

    both = {
        "targets": ["Linear"],
        "weights": said(weights),
        "input_activations": activations and said(activations),
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": both},
        "ignore": ["lm_head"],
        **rest,
    }


def targets(found: object) -> dict[str, Any]:
    quantization = group(("float", 8, "tensor"), ("float", 8, "tensor"))
    quantization["config_groups"]["group_0"]["targets"] = found
    return quantization


def write(directory: Path, stem: str, quantization: object, **changes: Any) -> Path:
    content = json.loads((CONFIGS / f"{stem}.json").read_text())
    path = directory / "model.json"
    path.write_text(json.dumps({**content, **changes, "quantization_config": quantization}))
    return path


def made(
    directory: Path, quantization: object, stem: str = "llama-3.1-8b", **wanted: Any
) -> tuple[Manifest, str]:
    """The manifest that a config gives, and its text."""
    asked = ManifestOptions(**{"tokens": (16,), "ranks": (1,), **wanted})
    text = manifest_yaml(make_manifest(write(directory, stem, quantization), asked))
    (directory / "made.yaml").write_text(text, encoding="ascii")
    return load_manifest(directory / "made.yaml"), text


def by_type(manifest: Manifest) -> dict[str, set[tuple[int, int]]]:
    found: dict[str, set[tuple[int, int]]] = {}
    for declared in manifest.declared:
        problem = declared.problem
        types = problem.signature.key.split("/", 2)[2]
        found.setdefault(types, set()).add((problem.n, problem.k))
    return found


@pytest.mark.parametrize(
    ("quantization", "types"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, TENSORS),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, ROWS),
        (group(("float", 8, "tensor"), ("float", 8, "tensor")), TENSORS),
        (targets("Linear"), TENSORS),
        (group(("float", 8, "channel"), ("float", 8, "token")), ROWS),
        (group(("float", 4, "tensor_group"), ("float", 4, "tensor_group")), NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, TENSORS),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, NVFP4),
    ],
)
def test_quantized_linears_are_declared_in_their_type_and_the_head_in_its_own(
    quantization: dict[str, Any], types: str, tmp_path: Path
) -> None:
    manifest, text = made(tmp_path, quantization)
    assert by_type(manifest) == {types: LINEARS, BF16: {HEAD}}
    assert "Left out" not in text
    assert f'Its checkpoint is quantized by "{quantization["quant_method"]}"' in text


OTHERS = {
    "awq": ({"quant_method": "awq", "bits": 4}, "awq quantizes only weights"),
    "int4 weights": (
        group(("int", 4, "group"), None),
        "its weights are int4 by group of 128 and its activations are not quantized",
    ),
    "int8": (
        group(("int", 8, "channel"), ("int", 8, "token")),
        "its weights are int8 by channel and its activations int8 by token, a pair that no",
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "its weights are fp8 in blocks of [128, 128], which no operator scales",
    ),
    "other fp8": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is e5m2"),
    "two groups": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}},
        "it has 2 config_groups",
    ),
    "no weights": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}},
        "its config_groups do not describe weights",
    ),
    "unknown": ({"quant_method": "new"}, "quantization_config new is not supported"),
    "dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "fp8 by token, because activation_scheme is not static (as vLLM reads it), a pair",
    ),
    "targets in part": (targets("LinearAttention"), "its config_groups do not cover all Linears"),
    "unnamed": ({}, "quantization_config without a quant_method is not supported"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_no_kernel_computes_is_left_out_and_never_declared_in_bf16(
    case: str, tmp_path: Path
) -> None:
    quantization, reason = OTHERS[case]
    manifest, text = made(tmp_path, quantization)
    assert by_type(manifest) == {BF16: {HEAD}}
    left_out = text.split("# Left out, because no kernel can serve it:\n")[1]
    assert left_out.count(reason) == len(left_out.splitlines()) == 7  # q, k, v, o, gate, up, down


@pytest.mark.parametrize(
    ("exceptions", "excepted"),
    [
        ({"ignore": ["lm_head", "re:.*self_attn.*"]}, {Q_PROJ, KV_PROJ}),
        ({"exclude_modules": ["model.layers.*.self_attn"]}, {Q_PROJ, KV_PROJ}),
        ({"ignored_layers": [f"model.layers.{n}.mlp.down_proj" for n in range(32)]}, {DOWN}),
        ({"ignored_layers": "down_proj"}, {DOWN}),
        ({"modules_to_not_convert": ["own_proj", "model.layers.1"]}, set()),
        ({"ignore": None}, set()),
    ],
)
def test_excepted_modules_keep_their_type(
    exceptions: dict[str, Any], excepted: set[tuple[int, int]], tmp_path: Path
) -> None:
    everywhere = "model.layers.1" not in (exceptions.get("modules_to_not_convert") or ())
    found = by_type(made(tmp_path, {**STATIC, **exceptions})[0])
    assert found[TENSORS] == LINEARS - excepted
    assert found[BF16] == {HEAD} | (excepted if everywhere else LINEARS)


def test_a_fused_pair_is_excepted_by_the_names_of_its_parts() -> None:
    read = read_quantization({**STATIC, "ignore": ["q_proj", "k_proj", "v_proj"]})

    def forms(role: str) -> object:
        return read.forms(ModelGemm(role=role, n=8, k=8), modules_of_family(role, 2))

    assert forms("attention qkv_proj") == (None,)
    assert forms("mlp gate_up_proj") == (read.types,)


def test_the_head_is_quantized_where_the_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no GEMM can be declared"):
        made(tmp_path, {"quant_method": "gptq", "lm_head": True})


def test_mxfp4_is_of_experts_alone(tmp_path: Path) -> None:
    manifest, text = made(tmp_path, {"quant_method": "mxfp4"}, stem="gpt-oss-20b")
    assert {declared.problem.signature.a for declared in manifest.declared} == {DType.BF16}
    left_out = text.split("# Left out, because no kernel can serve it:\n")[1]
    assert [line.split()[3:5] for line in left_out.splitlines()] == [
        ["expert", "gate_up_proj"],
        ["expert", "down_proj"],
    ]


def test_experts_with_scales_of_rows_are_declared(tmp_path: Path) -> None:
    rows = group(("float", 8, "channel"), ("float", 8, "token"))
    for arch in ("sm_90a", "sm_100f"):
        manifest, text = made(tmp_path, rows, stem="qwen3-30b-a3b", targets=(Target(arch=arch),))
        grouped = [one.problem for one in manifest.declared if one.problem.signature.op.has_groups]
        assert {one.signature.key for one in grouped} == {f"grouped_mm/tn/{ROWS}"}
        assert {(one.groups, one.n, one.k) for one in grouped} == {
            (128, 1536, 2048),
            (128, 2048, 768),
        }
        assert "Left out" not in text


def test_no_grouped_operator_takes_scales_of_tensors(tmp_path: Path) -> None:
    manifest, text = made(tmp_path, STATIC, stem="qwen3-30b-a3b")
    assert {declared.problem.signature.op for declared in manifest.declared} == {Op.MM}
    assert (
        "expert gate_up_proj x6144 [1536, 2048]: it is quantized to fp8_e4m3: grouped_mm takes "
        "scales fp32_row alone (here fp32_tensor)" in text
    )
    assert (128, 2048) in by_type(manifest)[BF16], "the router"


def test_hopper_has_operators_with_scales_of_tensors_and_none_of_blocks(tmp_path: Path) -> None:
    manifest, _ = made(tmp_path, STATIC, targets=(Target(arch="sm_90a"),))
    assert by_type(manifest) == {BF16: {HEAD}, TENSORS: LINEARS}
    blocks = group(("float", 4, "tensor_group"), ("float", 4, "tensor_group"))
    _, text = made(tmp_path, blocks, targets=(Target(arch="sm_90a"),))
    assert "sm_90a has no operator with block scales" in text


def test_results_are_of_every_wanted_type(tmp_path: Path) -> None:
    wanted = {"dtypes": (DType.BF16, DType.FP16)}
    manifest, _ = made(tmp_path, STATIC, **wanted)
    outs = {declared.problem.signature.out for declared in manifest.declared}
    assert outs == {DType.BF16, DType.FP16}
    path = write(tmp_path, "llama-3.1-8b", STATIC)
    counted = make_manifest(path, ManifestOptions(tokens=(16,), ranks=(1,), **wanted)).problems
    assert counted == len(manifest.declared) == 10


@pytest.mark.parametrize(
    ("quantization", "line"),
    [
        ([], "quantization_config: found []; allowed: an object, or no such key"),
        ({"ignore": [3]}, "quantization_config.ignore: found 3; allowed: module names"),
        (
            {"ignore": ["re:("]},
            "quantization_config.ignore: found re:(; allowed: a regular expression after re: "
            "(missing ), unterminated subpattern at position 0)",
        ),
    ],
)
def test_mistakes_are_named(quantization: object, line: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        made(tmp_path, quantization)
    assert str(caught.value) == f"{tmp_path / 'model.json'}: {line}"


def test_patterns_that_never_end_are_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization_module, "_MOST_SECONDS", 0.5)
    endless = {**group(("float", 8, "tensor"), ("float", 8, "tensor")), "ignore": ["re:(.+)+$!"]}
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ManifestError, match=r"matching its exceptions .* takes over 0\.5 s"):
        made(tmp_path, endless)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
