"""The manifests that ship: they load, and cover every GEMM of their models.

What a model runs is computed here from its config, independently of the files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvgemm_aot.manifest import Manifest, load_manifest

DIRECTORY = Path(__file__).resolve().parent.parent / "manifests"
FILES = sorted(DIRECTORY.glob("*.yaml"))

# By manifest: hidden size, attention heads, key-value heads, head dimension, intermediate size,
# vocabulary size, tensor-parallel degrees.
MODELS = {
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 128256, (1,)),
    "llama-3.3-70b": (8192, 64, 8, 128, 28672, 128256, (1, 4, 8)),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936, (1,)),
}


def linears(name: str) -> set[tuple[int, int]]:
    """(out features, in features) of every Linear that one GPU runs."""
    hidden, heads, kv_heads, head_dim, intermediate, vocabulary, degrees = MODELS[name]
    query, key_value = heads * head_dim, kv_heads * head_dim
    shapes = set()
    for tp in degrees:
        attention = (query + 2 * key_value, query, key_value)
        rest = (2 * intermediate, intermediate, vocabulary)
        shapes |= {(n // tp, hidden) for n in attention + rest}
        shapes |= {(hidden, k // tp) for k in (query, intermediate)}
    return shapes


def load(name: str) -> Manifest:
    return load_manifest(DIRECTORY / f"{name}.yaml")


def keys(manifest: Manifest) -> list[str]:
    return [declared.problem.key for declared in manifest.declared]


def test_every_model_and_the_quickstart_ship() -> None:
    assert {path.stem for path in FILES} >= {*MODELS, "quickstart"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loads_under_its_own_name(path: Path) -> None:
    manifest = load_manifest(path)
    assert manifest.name == path.stem
    assert manifest.description.endswith(".")
    assert len(manifest.description) <= 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_is_formatted_like_the_others(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\t" not in text
    assert [line for line in lines if line != line.rstrip() or len(line) > 100] == []
    top = [match[1] for line in lines if (match := re.match(r"([a-z]+):", line))]
    order = ["version", "name", "description", "targets", "candidates", "defaults", "gemms"]
    assert top == [key for key in order if key in top]
    indents = {len(line) - len(line.lstrip()) for line in lines if line}
    assert indents <= {0, 2, 4, 6}


@pytest.mark.parametrize("name", MODELS)
def test_states_where_the_sizes_come_from(name: str) -> None:
    text = (DIRECTORY / f"{name}.yaml").read_text(encoding="ascii")
    assert re.search(r"config\.json of [\w-]+/[\w.-]+ \(huggingface\.co\)", text)
    hidden, heads, kv_heads, head_dim, intermediate, vocabulary, _ = MODELS[name]
    head = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    for key, value in (
        ("hidden_size", hidden),
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("head_dim", head_dim),
        ("intermediate_size", intermediate),
        ("vocab_size", vocabulary),
    ):
        assert f"{key} {value}" in head


@pytest.mark.parametrize("name", MODELS)
def test_covers_every_linear_for_1_to_8192_tokens_and_nothing_else(name: str) -> None:
    expected = {
        f"mm/tn/{dtype}x{dtype}/fp32/{dtype}/m{2**power}n{n}k{k}"
        for dtype in ("bf16", "fp16")
        for power in range(14)
        for n, k in linears(name)
    }
    manifest = load(name)
    assert set(keys(manifest)) == expected
    assert len(manifest.declared) == len(expected)
    assert {declared.candidates for declared in manifest.declared} == {8}


@pytest.mark.parametrize(
    ("name", "count"), [("llama-3.1-8b", 196), ("llama-3.3-70b", 588), ("qwen3-8b", 196)]
)
def test_number_of_problems_is_as_counted_by_hand(name: str, count: int) -> None:
    assert len(load(name).declared) == count


def test_layer_of_llama_8b_at_one_token() -> None:
    sizes = {key.rpartition("/")[2] for key in keys(load("llama-3.1-8b")) if "/m1n" in key}
    assert sizes == {
        "m1n6144k4096",
        "m1n4096k4096",
        "m1n1024k4096",
        "m1n28672k4096",
        "m1n14336k4096",
        "m1n4096k14336",
        "m1n128256k4096",
    }


def test_tensor_parallel_ranks_of_llama_70b() -> None:
    sizes = {key.rpartition("/")[2] for key in keys(load("llama-3.3-70b")) if "/m1n" in key}
    assert len(sizes) == 21
    # qkv, o, gate_up, down and the head of one rank of 8.
    assert sizes >= {
        "m1n1280k8192",
        "m1n8192k1024",
        "m1n7168k8192",
        "m1n8192k3584",
        "m1n16032k8192",
    }


@pytest.mark.parametrize("name", [*MODELS, "quickstart"])
def test_builds_for_blackwell_and_hopper(name: str) -> None:
    assert [target.target.arch for target in load(name).targets] == ["sm_100f", "sm_90a"]


def test_quickstart_is_small_and_has_every_kind_of_gemm() -> None:
    manifest = load("quickstart")
    forward = {
        f"mm/tn/bf16xbf16/fp32/bf16/m{m}n{n}k{k}"
        for m in (1, 64, 2048)
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
