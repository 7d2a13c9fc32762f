"""Manifests from configs: what they declare, what they leave out and say, what they refuse."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from nvgemm_aot.cli.main import main
from nvgemm_aot.manifest.config_manifest import ManifestOptions
from nvgemm_aot.manifest.config_yaml import manifest_yaml
from nvgemm_aot.manifest.from_config import MAX_PROBLEMS, make_manifest
from nvgemm_aot.manifest.models import FAMILIES
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.manifest.source import MAX_FILE_BYTES
from nvgemm_runtime.errors import ManifestError, StorageError, ToolchainError
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.gemm.target import Target
from repository import ROOT, TESTS

CONFIGS = TESTS / "data" / "configs"
SHIPPED = ROOT / "manifests"
POWERS = tuple(2**power for power in range(14))
BOTH = (DType.BF16, DType.FP16)
HOPPER = (Target(arch="sm_90a"),)
BLACKWELL = (Target(arch="sm_100f"),)


def config(stem: str, **changes: Any) -> dict[str, Any]:
    """A published config, with some keys changed, and without those changed to ...."""
    changed = {**json.loads((CONFIGS / f"{stem}.json").read_text()), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def write(directory: Path, content: object, name: str = "model.json") -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def text_of(path: Path, **wanted: Any) -> str:
    return manifest_yaml(
        make_manifest(path, ManifestOptions(**{"tokens": (16,), "ranks": (1,), **wanted}))
    )


def load(directory: Path, content: dict[str, Any], **wanted: Any) -> Manifest:
    path = directory / "made.yaml"
    path.write_text(text_of(write(directory, content), **wanted), encoding="ascii")
    return load_manifest(path)


def keys(manifest: Manifest) -> set[str]:
    return {declared.problem.key for declared in manifest.declared}


def sizes(manifest: Manifest) -> set[tuple[int, int]]:
    return {(declared.problem.n, declared.problem.k) for declared in manifest.declared}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["manifest", "from-config", *map(str, arguments)])


LLAMA_70B = {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
QWEN_32B = {"hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25600}


@pytest.mark.parametrize(
    ("shipped", "content", "ranks"),
    [
        ("llama-3.1-8b", config("llama-3.1-8b"), (1,)),
        ("llama-3.3-70b", config("llama-3.1-8b", **LLAMA_70B), (1, 4, 8)),
        ("qwen3-8b", config("qwen3-8b"), (1,)),
        ("qwen3-32b", config("qwen3-8b", **QWEN_32B), (1,)),
        ("qwen3-30b-a3b", config("qwen3-30b-a3b"), (1,)),
    ],
)
def test_shipped_manifests_are_what_their_configs_give_fused_and_separate(
    shipped: str, content: dict[str, Any], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    manifest = load_manifest(SHIPPED / f"{shipped}.yaml")
    dtypes = tuple({declared.problem.signature.a for declared in manifest.declared})
    made = load(tmp_path, content, tokens=POWERS, ranks=ranks, dtypes=dtypes, fused=True)
    gated = {
        declared.problem.key
        for declared in manifest.declared
        if declared.problem.signature.is_gated
    }
    assert keys(made) == keys(manifest) - gated
    if shipped in ("llama-3.1-8b", "qwen3-8b"):
        more = load(tmp_path, content, tokens=POWERS, dtypes=(DType.BF16,), fused=True, gated=True)
        assert gated == {key for key in keys(more) if "swiglu_halves" in key}


def test_separate_is_what_transformers_has_and_fused_what_servers_make_of_it(
    tmp_path: Path,
) -> None:
    content = config("llama-3.1-8b")
    apart = sizes(load(tmp_path, content))
    fused = sizes(load(tmp_path, content, separate=False, fused=True))
    assert apart - fused == {(1024, 4096), (14336, 4096)}
    assert fused - apart == {(6144, 4096), (28672, 4096)}


# By hand: of one of 8 ranks, fused, [out features, in features].
RANK_OF_8 = {
    "qwen3-30b-a3b": {
        (768, 2048),  # qkv: 32 / 8 query heads, and one of 4 key-value heads twice, of 128
        (2048, 512),  # o: 4 heads of 128
        (128, 2048),  # router, on every rank
        (192, 2048),  # an expert's gate and up: 2 * 768 / 8
        (2048, 96),  # an expert's down
        (18992, 2048),  # the head: 151936 / 8
    },
    "gpt-oss-20b": {
        (640, 2880),  # qkv: 64 / 8 query heads, and one of 8 key-value heads twice, of 64
        (2880, 512),  # o: 8 heads of 64
        (32, 2880),  # router, on every rank
        (720, 2880),  # an expert's gate and up: 2 * 2880 / 8
        (2880, 360),  # an expert's down
        (25136, 2880),  # the head: 201088 / 8
    },
    "deepseek-v3": {
        (2112, 7168),  # both latents: 1536 + 512 + 64, on every rank
        (3072, 1536),  # q_b: 16 heads of 192
        (4096, 512),  # kv_b: 16 heads of 128 + 128
        (7168, 2048),  # o: 16 heads of 128
        (4608, 7168),  # dense gate and up: 2 * 18432 / 8
        (7168, 2304),  # dense down
        (512, 7168),  # gate and up of an expert, and of the shared one: 2 * 2048 / 8
        (7168, 256),  # their down
        (16160, 7168),  # the head: 129280 / 8
    },
}


@pytest.mark.parametrize("stem", RANK_OF_8)
def test_one_of_eight_ranks_as_counted_by_hand(stem: str, tmp_path: Path) -> None:
    made = load(tmp_path, config(stem), ranks=(8,), separate=False, fused=True)
    assert sizes(made) == RANK_OF_8[stem]


def test_experts_are_grouped_where_targets_have_operators_for_that(tmp_path: Path) -> None:
    content = config("qwen3-30b-a3b")
    made = load(tmp_path, content, tokens=(1, 16, 100, 4096), dtypes=BOTH)
    experts = {d.problem.key for d in made.declared if (d.problem.n, d.problem.k) == (1536, 2048)}
    assert experts == {
        f"grouped_mm/tn/{dtype}x{dtype}/fp32/{dtype}/g128m{8 * tokens}n1536k2048"
        for dtype in ("bf16", "fp16")
        for tokens in (1, 16, 100, 4096)
    }
    for targets in (HOPPER, (*BLACKWELL, *HOPPER)):
        same = load(tmp_path, content, tokens=(1, 16, 100, 4096), dtypes=BOTH, targets=targets)
        assert {d.problem.key for d in same.declared} == {d.problem.key for d in made.declared}


@pytest.mark.parametrize("targets", [HOPPER, BLACKWELL])
def test_expert_weights_of_gpt_oss_are_row_major_in_groups(
    targets: tuple[Target, ...], tmp_path: Path
) -> None:
    made = load(tmp_path, config("gpt-oss-20b"), targets=targets)
    experts = [d.problem for d in made.declared if d.problem.groups > 1]
    assert {p.signature.key for p in experts} == {"grouped_mm/tt/bf16xbf16/fp32/bf16"}
    assert {(p.groups, p.n, p.k) for p in experts} == {(32, 5760, 2880), (32, 2880, 2880)}


def test_biases_are_declared_where_targets_have_operators_for_them(tmp_path: Path) -> None:
    content = config("gpt-oss-20b")

    def signatures(targets: tuple[Target, ...]) -> Counter[str]:
        made = load(tmp_path, content, targets=targets)
        layers = [d.problem for d in made.declared if d.problem.m == 16 and d.problem.n != 201088]
        return Counter(problem.signature.key for problem in layers)

    product = "mm/tn/bf16xbf16/fp32/bf16"
    for targets in (BLACKWELL, HOPPER, (*BLACKWELL, *HOPPER)):
        assert signatures(targets) == {f"{product}/bias": 4}
        assert "+bias" not in text_of(write(tmp_path, content), targets=targets)


def test_each_pair_stands_once_an_entry_with_every_role_and_rank(tmp_path: Path) -> None:
    text = text_of(write(tmp_path, config("deepseek-v3")), ranks=(1, 8), fused=True)
    for entry in text.split("  - comment: ")[1:]:
        pairs = re.findall(r"- (\[\d+, \d+\]) # tp ", entry)
        assert pairs
        assert len(set(pairs)) == len(pairs)
    assert "[7168, 2048] # tp 1: shared experts down_proj x58; tp 8: attention o_proj x61" in text
    assert "[576, 7168] # tp 1, 8: attention kv_a_proj_with_mqa x61" in text


def test_what_no_kernel_can_serve_is_left_out_with_the_reason(tmp_path: Path) -> None:
    content = config("deepseek-v3", vocab_size=129284)
    text = text_of(write(tmp_path, content), ranks=(1, 8))
    _, left_out = text.split("# Left out, because no kernel can serve it:\n")
    assert left_out.splitlines() == [
        "#   tp 1, 8: router x58 [256, 7168]: it is computed in fp32",
        "#   tp 1: lm_head x1 [129284, 7168]: out is contiguous along n = 129284, which must be a "
        "multiple of 8 (16 bytes of bf16)",
        "#   tp 8: lm_head x1 [129284, 7168]: n = 129284 cannot be divided by 8 ranks",
    ]
    assert {n for n, _ in sizes(load(tmp_path, content))}.isdisjoint({256, 129284})


def test_a_model_of_which_nothing_can_be_declared_is_an_error(tmp_path: Path) -> None:
    odd = config("llama-3.1-8b", hidden_size=60, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ManifestError) as caught:
        text_of(write(tmp_path, odd))
    assert "no GEMM can be declared" in str(caught.value)
    assert "lm_head [128256, 60], tp 1: A is contiguous along k = 60" in str(caught.value)


def test_more_problems_than_a_manifest_holds_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, config("llama-3.1-8b"))
    tokens = tuple(range(1, MAX_PROBLEMS // 10 + 2))  # five pairs of n and k, two dtypes
    assert text_of(path, tokens=tokens[:-1], dtypes=BOTH)
    with pytest.raises(ManifestError, match="found 100010 problems; allowed: at most 100000 in"):
        text_of(path, tokens=tokens, dtypes=BOTH)


def test_heads_that_ranks_cannot_share_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, config("qwen3-30b-a3b"))
    with pytest.raises(ManifestError) as caught:
        text_of(path, ranks=(1, 3, 4, 64))
    assert str(caught.value).splitlines() == [
        f"{path}: num_attention_heads: found 32; allowed with tp 3: a multiple of 3",
        f"{path}: num_key_value_heads: found 4; allowed with tp 3: a multiple or a divisor of 3",
        f"{path}: num_attention_heads: found 32; allowed with tp 64: a multiple of 64",
    ]


MISTAKES = {
    "no architecture": (
        config("llama-3.1-8b", model_type=...),
        ["model_type: found no such key; allowed: the name of an architecture, such as llama; "
         "record a model without one with nvgemm-aot record"],
    ),
    "several": (
        config(
            "qwen3-30b-a3b",
            vocab_size=0,
            hidden_size="2048",
            num_hidden_layers=None,
            num_experts=...,
            intermediate_size=2**31,
            decoder_sparse_step=1.0,
            mlp_only_layers=[3, -1],
            attention_bias=1,
        ),
        ["vocab_size: found 0; allowed: an integer of at least 1",
         "hidden_size: found '2048'; allowed: an integer",
         "num_hidden_layers: found null; allowed: an integer",
         "num_experts: found no such key, which qwen3_moe requires",
         "intermediate_size: found 2147483648; allowed: an integer of at most 2147483647",
         "decoder_sparse_step: found 1.0; allowed: an integer",
         "mlp_only_layers.1: found -1; allowed: an integer of at least 0",
         "attention_bias: found 1; allowed: true or false"],
    ),
    "heads that do not share": (
        config("qwen3-8b", num_key_value_heads=5),
        ["num_key_value_heads: found 5; allowed: a divisor of num_attention_heads, 32"],
    ),
    "no head size": (
        config("llama-3.1-8b", num_attention_heads=24),
        ["head_dim: found none, and hidden_size 4096 is not a multiple of num_attention_heads 24; "
         "allowed: a positive integer"],
    ),
    "more experts a token than there are": (
        config("gpt-oss-20b", num_experts_per_tok=33),
        ["num_experts_per_tok: found 33; allowed: at most the number of experts, 32"],
    ),
    "no rank of a latent": (
        config("deepseek-v3", q_lora_rank=..., kv_lora_rank=None),
        ["q_lora_rank: found no such key, which deepseek_v3 requires",
         "kv_lora_rank: found null; allowed: an integer"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_every_mistake_of_a_config_is_named(case: str, tmp_path: Path) -> None:
    content, lines = MISTAKES[case]
    path = write(tmp_path, content)
    with pytest.raises(ManifestError) as caught:
        text_of(path)
    assert str(caught.value).splitlines() == [f"{path}: {line}" for line in lines]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{\n "model_type": }', ":2:16: not JSON: Expecting value; allowed: the JSON object"),
        (b"", ":1:1: not JSON"),
        (b'["llama"]', ": found a list of 1; allowed: the JSON object"),
        (b"null", ": found null; allowed: the JSON object"),
        (b"\xff\xfe\xfa", ": not JSON: "),
        (b'{"model_type": "\\ud800"}', ": found '\\ud800' in a string, half of a surrogate pair"),
        (b'{"\\udfff": 1}', ": found '\\udfff' in a string, half of a surrogate pair"),
        (b"[" * 100_000, ": not JSON: nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", ": not JSON: "),
        (b" " * (MAX_FILE_BYTES + 1), f": the file is over {MAX_FILE_BYTES} bytes"),
    ],
    ids=[
        "syntax",
        "empty",
        "list",
        "null",
        "bytes",
        "surrogate",
        "surrogate in a key",
        "deep",
        "digits",
        "long",
    ],
)
def test_a_file_that_is_no_config_is_an_error(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        text_of(path)
    assert str(caught.value).startswith(f"{path}{says}")


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=3),
    st.just({}),
)


@settings(max_examples=150)
@given(
    stem=st.sampled_from([path.stem for path in CONFIGS.glob("*.json")]),
    changes=st.data(),
    ranks=st.sampled_from([1, 2, 3, 8]),
    expert_ranks=st.sampled_from([1, 2, 8]),
    training=st.booleans(),
)
def test_any_config_gives_a_manifest_that_loads_or_an_error_that_names_it(
    stem: str,
    changes: st.DataObject,
    ranks: int,
    expert_ranks: int,
    training: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.getbasetemp()
    content = config(stem)
    for key in changes.draw(st.lists(st.sampled_from([*content, "head_dim"]), max_size=3)):
        content[key] = changes.draw(values)
    refused = ""
    try:
        manifest = load(
            directory,
            content,
            ranks=(ranks,),
            expert_ranks=(expert_ranks,),
            fused=True,
            training=training,
        )
    except (ManifestError, ToolchainError) as error:  # the latter where transformers is missing
        refused = str(error)
    if refused:
        assert refused.startswith(f"{directory / 'model.json'}: ")
    else:
        assert manifest.declared


def test_the_command_prints_a_manifest_that_loads(tmp_path: Path) -> None:
    result = run(CONFIGS / "llama-3.1-8b.json", "--tokens", "256, 1,16,1", "--tp", "1,8")
    assert result.exit_code == 0, result.output
    (tmp_path / "printed.yaml").write_text(result.stdout)
    made = load_manifest(tmp_path / "printed.yaml")
    assert made.name == "llama-3.1-8b"
    assert [target.target.arch for target in made.targets] == ["sm_100f"]
    assert {declared.problem.m for declared in made.declared} == {1, 16, 256}
    assert {declared.problem.signature.a for declared in made.declared} == {DType.BF16}
    assert len(made.declared) == 3 * (5 + 6)


def test_the_command_writes_a_file_and_says_what_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.yaml"
    arguments = ["--tokens", "8", "--dtype", "fp16", "--dtype", "bf16", "--fused", "-o", out]
    targets = ["--target", "sm_90a", "--target", "sm_100f", "--name", "mine"]
    result = run(CONFIGS / "deepseek-v3.json", *arguments, *targets)
    assert result.exit_code == 0, result.output
    made = load_manifest(out)
    assert made.name == "mine"
    assert [target.arch for target in made.bundle_targets] == ["sm_100f", "sm_90a"]
    assert {declared.problem.signature.a for declared in made.declared} == set(BOTH)
    assert result.stdout == f"{out}: written, {len(made.declared)} problems\n"
    assert "  58: it is computed in fp32" in result.stderr
    assert (2112, 7168) in sizes(made), "fused"
    assert (1536, 7168) not in sizes(made), "and not separate"


def test_a_target_is_named_with_its_platform_and_cuda_version(tmp_path: Path) -> None:
    out = tmp_path / "arm.yaml"
    named = ("sm_90a-linux_aarch64-cu12", "sm_100f-linux_aarch64", "sm_90a", "sm_90a-cu13")
    options = itertools.chain.from_iterable(("--target", one) for one in named)
    result = run(CONFIGS / "qwen3-8b.json", "--tokens", "8", *options, "-o", out)
    assert result.exit_code == 0, result.output
    assert (
        "targets: [{arch: sm_90a, platform: linux_aarch64, cuda: cu12}, "
        "{arch: sm_100f, platform: linux_aarch64}, sm_90a]\n" in out.read_text()
    )
    assert [(one.target.key, one.device.name) for one in load_manifest(out).targets] == [
        ("sm_100f-linux_aarch64-cu13", "GB200"),
        ("sm_90a-linux_aarch64-cu12", "H200"),
        ("sm_90a-linux_x86_64-cu13", "H200"),
        ("sm_90a-linux_x86_64-cu13", "H100"),
    ]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Llama-3.1_8B Instruct/config.json", "llama-3.1-8b-instruct"),
        ("1.5/config.json", "1.5"),
        ("null/config.json", "null"),
        ("x/Mine (2).json", "mine-2"),
    ],
)
def test_name_is_that_of_the_directory_or_the_file(file: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path, config("llama-3.1-8b"), file)
    given = path.parent if path.name == "config.json" else path
    result = run(given, "--tokens", 1, "-o", tmp_path / "made.yaml")
    assert result.exit_code == 0, result.output
    assert load_manifest(tmp_path / "made.yaml").name == name


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "Missing option '--tokens'"),
        (["--tokens", "1,,2"], 2, "found ''; allowed: integers in 1..2147483647"),
        (["--tokens", "0"], 2, "found '0'"),
        (["--tokens", "2147483648"], 2, "found '2147483648'"),
        (["--tokens", "1", "--tp", "x"], 2, "found 'x'"),
        (["--tokens", "1", "--dtype", "fp8_e4m3"], 2, "'fp8_e4m3' is not one of"),
        (
            ["--tokens", "1", "--target", "sm_77"],
            2,
            "no provider builds for 'sm_77'; allowed: sm_90a, ",
        ),
        (["--tokens", "1", "--name", "No"], 10, "name: found 'No'; allowed: lower-case"),
        (["--tokens", "1", "--tp", "3"], 10, "num_attention_heads: found 32; allowed with tp 3"),
    ],
)
def test_wrong_arguments_are_said(arguments: list[str], code: int, says: str) -> None:
    result = run(CONFIGS / "llama-3.1-8b.json", *arguments)
    assert result.exit_code == code
    assert says in result.stderr
    assert not result.stdout


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    missing = run(tmp_path / "no.json", "--tokens", 1)
    assert missing.exit_code == ManifestError.exit_code
    assert f"{tmp_path / 'no.json'}: no such file" in missing.stderr
    bare = run(tmp_path, "--tokens", 1)
    assert f"{tmp_path / 'config.json'}: no such file" in bare.stderr
    (tmp_path / "file").touch()
    shut = run(CONFIGS / "qwen3-8b.json", "--tokens", 1, "-o", tmp_path / "file" / "x.yaml")
    assert shut.exit_code == StorageError.exit_code
    assert not shut.stdout


def test_neither_torch_nor_a_compiler_is_needed() -> None:
    script = (
        "import sys; from nvgemm_aot.cli.main import main\n"
        "try: main()\n"
        "finally: print({'torch', 'cutlass', 'nvMatmulHeuristics', 'cuda'} & {*sys.modules})"
    )
    arguments = ["manifest", "from-config", str(CONFIGS / "qwen3-8b.json"), "--tokens", "1"]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "set()"


def test_names_without_a_letter_are_asked_for(tmp_path: Path) -> None:
    result = run(write(tmp_path, config("qwen3-8b"), "_.json"), "--tokens", 1)
    assert result.exit_code == ManifestError.exit_code
    assert result.stderr.rstrip().endswith("; set one with --name")


def test_every_family_is_documented() -> None:
    document = (ROOT / "docs/guide/from-config.md").read_text("utf-8")
    assert {family for family in FAMILIES if f"`{family}`" not in document} == set()


def test_gated_declares_gate_and_up_with_their_gate(tmp_path: Path) -> None:
    made = load(tmp_path, config("qwen3-8b"), ranks=(1, 2), targets=HOPPER, gated=True)
    gated = {key for key in keys(made) if "glu" in key}
    assert gated == {
        f"mm/tn/bf16xbf16/fp32/bf16/swiglu_halves/m16n{n}k4096" for n in (24576, 12288)
    }
    assert keys(made) - gated == keys(
        load(tmp_path, config("qwen3-8b"), ranks=(1, 2), targets=HOPPER)
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mlp_bias": True}, "with its gate: swiglu_halves adds no bias, but the model does"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "geglu_halves"),
        ({"hidden_act": "relu"}, ""),
    ],
)
def test_gated_goes_by_the_activation_and_the_bias(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, config("llama-3.1-8b", **changes))
    text = text_of(path, gated=True)
    assert reason in text
    assert ("epilogue: geglu_halves" in text) == (changes.get("hidden_act") == "gelu_pytorch_tanh")
    assert "epilogue: swiglu" not in text


@pytest.mark.parametrize(
    ("stem", "epilogue"),
    [("gpt-oss-20b", "swiglu_oai_interleaved"), ("qwen3-30b-a3b", "swiglu_halves")],
)
def test_gates_of_experts_are_declared_in_groups(stem: str, epilogue: str, tmp_path: Path) -> None:
    text = text_of(write(tmp_path, config(stem)), gated=True)
    assert re.search(r"m = tokens \* [48]\), with its gate \(n counts gates and ups\)", text)
    made = load(tmp_path, config(stem), gated=True).declared
    *gathered, gated = (one.problem for one in made if one.problem.signature.is_gated)
    layout = "tt" if stem.startswith("gpt") else "tn"
    assert gated.signature.key == f"grouped_mm/{layout}/bf16xbf16/fp32/bf16/{epilogue}"
    assert [one.signature.key for one in gathered] == (
        [f"gathered_{gated.signature.key}"] if stem.startswith("qwen3") else []
    )
