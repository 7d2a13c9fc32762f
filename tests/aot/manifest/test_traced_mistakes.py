"""Configs that transformers does not know, refuses or cannot build, and a missing transformers."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.traced import building
from nvgemm_runtime.errors import ManifestError, ToolchainError

SMALL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run(directory: Path, content: dict[str, Any], *options: object) -> Result:
    path = directory / "config.json"
    path.write_text(json.dumps(content))
    arguments = ["manifest", "from-config", path, "--tokens", "16", "--name", "x", *options]
    return CliRunner().invoke(main, list(map(str, arguments)))


needs_transformers = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="transformers needs Python 3.11"
)


def without_transformers(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    known = importlib.metadata.version

    def find(name: str) -> str:
        if name != "transformers":
            return known(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))


def test_a_missing_transformers_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_transformers(monkeypatch, None)
    result = run(tmp_path, SMALL)
    assert result.exit_code == ToolchainError.exit_code
    assert "model_type 'mistral' needs transformers" in result.stderr
    assert (
        "transformers is not installed; run: pip install 'transformers>=5.23,<6'" in result.stderr
    )


@pytest.mark.parametrize("version", ["4.57.1", "5.22.9", "6.0.0"])
def test_another_transformers_is_named_with_its_version(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_transformers(monkeypatch, version)
    result = run(tmp_path, SMALL)
    assert result.exit_code == ToolchainError.exit_code
    assert f"allowed: transformers>=5.23,<6; found transformers {version}" in result.stderr


def test_a_python_without_transformers_keeps_the_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    result = run(tmp_path, SMALL)
    assert result.exit_code == ToolchainError.exit_code
    assert "Python 3.11 or newer; found Python 3.10" in result.stderr
    assert "not: deepseek_v3, gpt_oss, llama, mixtral, qwen3, qwen3_moe)" in result.stderr
    assert run(tmp_path, {**SMALL, "model_type": "llama"}).exit_code == 0


def test_families_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    code = (
        "import sys; from nvgemm_aot.manifest.config_json import read_model; "
        "from pathlib import Path; read_model(Path(sys.argv[1])); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "config.json"], check=True)


@needs_transformers
def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, {**SMALL, "model_type": "mistrall"})
    assert result.exit_code == ManifestError.exit_code
    assert "model_type: found 'mistrall'; allowed: an architecture that transformers" in (
        result.stderr
    )
    assert "nvgemm-aot record --fake" in result.stderr


REMOTE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


@needs_transformers
def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
    unknown = {**SMALL, "model_type": "evil", "architectures": ["Evil"], "auto_map": REMOTE}
    result = run(tmp_path, unknown)
    assert result.exit_code == ManifestError.exit_code
    assert "whose model is code in the checkpoint (auto_map), which never runs" in result.stderr
    assert "nvgemm-aot record --fake" in result.stderr
    # transformers has a class of its own for this one.
    known = run(tmp_path, {**SMALL, "auto_map": REMOTE})
    assert known.exit_code == 0, known.stderr
    assert "MistralForCausalLM (transformers" in known.stdout
    assert not ran.exists()


@needs_transformers
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "64"}, "refuses it as a config of mistral: "),
        ({"num_hidden_layers": 2.5}, "refuses it as a config of mistral: "),
        ({"rope_parameters": "yes"}, "as a config of mistral"),
        ({"hidden_size": -64}, "cannot build its MistralForCausalLM without weights: "),
        ({"num_attention_heads": 0, "head_dim": None}, "mistral"),
        ({"hidden_act": "no such function"}, "cannot build its MistralForCausalLM"),
        ({"hidden_size": 2**40, "vocab_size": 2**40}, "cannot build its MistralForCausalLM"),
        ({"num_hidden_layers": 1000}, "it has more than 100000 modules"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers: found 1000000000; allowed: at most 1024",
        ),
        (
            {"model_type": "swin", "architectures": [], "depths": [2, 10**9]},
            "depths: found 1000000000; allowed: at most 1024",
        ),
        (
            {"model_type": "qwen3_vl", "vision_config": {"depth": 10**9}},
            "vision_config.depth: found 1000000000; allowed: at most 1024",
        ),
        (
            {"model_type": "vit", "architectures": [], "image_size": 10**9},
            "no run of the model reaches it, because forward could not run",
        ),
        ({"quantization_config": 3}, "quantization_config: found 3; allowed: an object"),
    ],
)
def test_what_transformers_cannot_build_is_an_error_with_its_reason(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changes.get("num_hidden_layers") == 1000:
        monkeypatch.setattr(building, "_MOST_MODULES", 2000)
        says = says.replace("100000", "2000")
    result = run(tmp_path, {**SMALL, **changes})
    assert result.exit_code == ManifestError.exit_code, (result.output, result.exception)
    assert says in result.stderr
    assert result.stderr.startswith(f"Error: {tmp_path / 'config.json'}: ") or (
        f"{tmp_path / 'config.json'}: " in result.stderr
    )


@needs_transformers
def test_architectures_that_are_no_models_leave_the_usual_class(tmp_path: Path) -> None:
    for names in (["os"], ["AutoConfig"], ["BertModel"], [3], "MistralModel", ["NoSuchClass"]):
        result = run(tmp_path, {**SMALL, "architectures": names})
        assert result.exit_code == 0, result.stderr
        assert "MistralForCausalLM (transformers" in result.stdout
    backbone = run(tmp_path, {**SMALL, "architectures": ["MistralModel"]})
    assert "MistralModel (transformers" in backbone.stdout
    assert "lm_head" not in backbone.stdout


@needs_transformers
def test_a_config_that_asks_for_tuples_is_run_all_the_same(tmp_path: Path) -> None:
    result = run(tmp_path, {**SMALL, "return_dict": False})
    assert result.exit_code == 0, result.stderr
    assert "lm_head x1" in result.stdout
    assert not result.stderr


@needs_transformers
def test_a_part_that_cannot_be_run_is_said_and_its_weights_listed(tmp_path: Path) -> None:
    # 896 / 14 patches along a side, of which 7 x 7 tokens cannot be made.
    content = {
        "model_type": "gemma3",
        "mm_tokens_per_image": 16384,
        "text_config": {**SMALL, "model_type": "gemma3_text", "head_dim": 16},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 224,
            "patch_size": 14,
        },
    }
    result = run(tmp_path, content)
    assert result.exit_code == 0, result.stderr
    assert "warning: image features could not run: RuntimeError" in result.stderr
    assert "model.language_model.layers.*.mlp.down_proj x2" in result.stdout
    assert "# Left out: image features could not run" in result.stdout


@needs_transformers
def test_a_quantized_config_that_leaves_little_says_so(tmp_path: Path) -> None:
    result = run(tmp_path, {**SMALL, "quantization_config": {"quant_method": "awq"}})
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[0] == (
        "nvgemm-aot: warning: most GEMMs are left out: 14 of 15 GEMMs of a forward pass are not "
        "declared; the file's end lists them"
    )
    assert lines[1].startswith("nvgemm-aot:   14: awq quantizes only weights")
    assert "lm_head x1" in result.stdout


@needs_transformers
def test_a_recipe_with_operators_is_declared_but_for_excepted_modules(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    ignored = {**fp8, "modules_to_not_convert": ["layers.1.mlp", "re:.*o_proj"]}
    result = run(tmp_path, {**SMALL, "quantization_config": ignored}, "--target", "sm_100f")
    assert result.exit_code == 0, result.stderr
    plain, quantized = {}, {}
    for entry in result.stdout.split("  - comment: ")[1:]:
        kind = quantized if "dtype: fp8_e4m3" in entry else plain
        kind.update(dict.fromkeys(re.findall(r"\.([a-z_]+) x2", entry), entry))
    assert plain.keys() == {"gate_proj", "up_proj", "down_proj", "o_proj"}
    # The MLP of one layer of two is quantized.
    assert quantized.keys() == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}


def test_an_edited_file_is_not_replaced(tmp_path: Path) -> None:
    llama = {**SMALL, "model_type": "llama"}
    out = tmp_path / "made.yaml"
    assert run(tmp_path, llama, "-o", out).exit_code == 0
    written = out.read_bytes()
    assert run(tmp_path, {**llama, "vocab_size": 1024}, "-o", out).exit_code == 0  # as it was
    assert out.read_bytes() != written
    edited = out.read_bytes().replace(b"m: [16]", b"m: [16, 32]")
    for content in (edited, b"version: 1\n", b"", b"\xff", written + b"# mine\n"):
        out.write_bytes(content)
        result = run(tmp_path, llama, "-o", out)
        assert result.exit_code == 16
        assert f"{out}: not replaced: it was edited since nvgemm-aot wrote it" in result.stderr
        assert out.read_bytes() == content
