"""Serving benchmark: turns, caches, kernels' time and share, digests, table and records."""

from __future__ import annotations

import importlib.util
import json
import logging
import logging.config
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks import cases
from benchmarks.record import read as read_records
from benchmarks.record import records_of, run_of
from benchmarks.serving import __main__ as serving
from benchmarks.serving import digests, engines, kernels, reference, table, worker, workload
from benchmarks.serving.turns import Caches, Process, left_of, turns
from benchmarks.shared.kernel_intervals import Interval
from benchmarks.tables import serving as serving_table
from benchmarks.tables.selection import Selection
from repository import ROOT

WORK = workload.Workload(
    engine="vllm", model="tiny", layers=2, batches=(1, 4), prefills=(64,), tokens=8
)


def run(mode: str, start: str, speed: float = 1.0, **more: Any) -> dict[str, Any]:
    """Builds one process' answer; a mode of speed 1.1 has 1.1 times the rates."""

    def row(rate: float) -> dict[str, Any]:
        kinds = {"bundled": 60.0 if mode == "auto" else 0.0, "gemm": 40.0, "other": 9.0}
        times = {"busy_us": 100 / speed, "kinds_us": kinds, "names_us": {}}
        return {"rates": [rate * speed, rate * speed], "kernels": [times, times]}

    return {
        "mode": mode,
        "start": start,
        "seconds": {"start": 90.0 if start == "cold" else 40.0},
        "memory_mb": 20000,
        "decode": {"1": row(150.0), "16": row(2400.0)},
        "prefill": {"512": row(9000.0)},
        "accuracy": {part: {"rms": 0.01, "most": 0.02} for part in ("prefill", "decode")},
        "gemms": {},
        "count": {"nvgemm": 4 if mode == "auto" else 0, "aten": 4, "triton": 0},
        "digests": {"choices": mode, "reductions": "r", "tokens": mode},
        "stats": {
            "milliseconds": {"matching": 500.0} if mode == "auto" else {},
            "while_serving_ms": 0.0,
            "failed": {},
            "said": ["nvgemm-aot: bundled kernels serve 5 of 5"] if mode == "auto" else [],
        },
        "versions": {
            "device": "NVIDIA H100 80GB HBM3", "driver": "5", "torch": "2.11.0", "CUDA": "13",
            "nvgemm-aot": "0.1.0", "engine": "0.26.0",
            "bundles": ["wheel: b"] if mode == "auto" else [],
        },
        **more,
    }  # fmt: skip


def record_of(*runs: dict[str, Any]) -> dict[str, Any]:
    """Builds a raw file's content."""
    commands = [{"command": "serving", "date": "2026-11-27"}]
    return {
        "what": "serving",
        "commands": commands,
        "workload": WORK.to_json(),
        "runs": list(runs),
    }


def test_modes_take_turns_and_a_warm_process_follows_its_cold_one() -> None:
    assert [(one.mode.value, one.start.value) for one in turns(3)] == [
        ("off", "cold"), ("auto", "cold"), ("auto", "warm"), ("off", "warm"), ("off", "cold"),
        ("auto", "cold"),
    ]  # fmt: skip


def test_a_warm_process_that_is_left_gets_a_cold_one_before_it() -> None:
    order = turns(3)
    assert left_of(order, []) == order
    assert left_of(order, order) == []
    assert left_of(order, order[:4]) == order[4:]
    left = [one.label for one in left_of(order, order[:2])]
    assert left == ["auto, cold", "auto, warm", "off, cold", "off, warm"]
    assert [one.label for one in left_of(turns(2), order[:3])] == ["off, cold", "off, warm"]


def test_cold_processes_have_caches_of_their_own_and_warm_ones_those_of_the_last(
    tmp_path: Path,
) -> None:
    caches = Caches(tmp_path)
    found = [caches.of(process) for process in turns(3)]
    off, auto, again, off_again, other, another = found
    assert (again, off_again) == (auto, off)
    assert len({off, auto, other, another}) == 4


def test_kernels_are_told_apart_by_name() -> None:
    kinds = {
        "kernel_cutlass_kernel_quackgemm_default_epiGemmDefaultSm90_object_at__": "bundled",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "gemm",
        "void cublasLt::splitKreduce_kernel<32, 16>": "gemm",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>": "gemm",
        "triton_tem_fused_mm_0": "gemm",
        "triton_red_fused_add_mm_mean_0": "other",
        "void cutlass::device_kernel<flash::enable_sm90<CollectiveMainloop, GemmShape>>": (
            "attention"
        ),
        "vllm::reshape_and_cache_flash_kernel": "attention",
        "Memcpy DtoD (Device -> Device)": "other",
    }
    assert {name: kernels.kind_of(name).value for name in kinds} == kinds


def test_kernel_time_is_the_union_and_the_share_is_that_of_gemms() -> None:
    def interval(begin: int, end: int, name: str) -> Interval:
        return Interval(begin_ns=begin, end_ns=end, name=name)

    found = kernels.kernel_time(
        [
            interval(0, 6000, "kernel_cutlass_a"),
            interval(5000, 7000, "nvjet_b"),  # overlaps by dependent launch
            interval(8000, 9000, "triton_poi_fused"),
        ],
        steps=2,
    )
    assert found.busy_us == 4.0
    assert found.kinds_us == {"bundled": 3.0, "gemm": 1.0, "attention": 0.0, "other": 0.5}
    assert found.served == 0.75
    assert list(found.to_json()["names_us"]) == ["kernel_cutlass_a", "nvjet_b", "triton_poi_fused"]
    assert kernels.share_served({"other": 1.0}) is None
    with pytest.raises(RuntimeError, match="saw no kernel"):
        kernels.kernel_time([], steps=1)


def test_choices_are_counted_once_and_reductions_without_their_times(tmp_path: Path) -> None:
    code = "async_compile = AsyncCompile()\nnvgemm_mm_by_m_0123456789ab(a)\nextern_kernels.mm(b)\n"
    for name in ("one/code.py", "two/copy.py"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(code)
    (tmp_path / "kernel.py").write_text("extern_kernels.mm(b)\n")  # no module that calls kernels
    assert digests.gemms_below(tmp_path) == {
        "extern_kernels.mm": 1,
        "nvgemm_mm_by_m_0123456789ab": 1,
    }
    best = tmp_path / "c1.best_config"
    best.write_text('{"XBLOCK": 1, "time_taken_ms": 5}')
    (tmp_path / "broken.best_config").write_text("{")
    first = digests.digest(digests.reductions_below(tmp_path))
    best.write_text('{"XBLOCK": 1, "time_taken_ms": 6}')
    assert digests.digest(digests.reductions_below(tmp_path)) == first
    best.write_text('{"XBLOCK": 2, "time_taken_ms": 6}')
    assert digests.digest(digests.reductions_below(tmp_path)) != first
    assert len(first) == digests.LENGTH


class FakeEngine:
    """Counts what it is asked for; its tokens are the prompt's last, and take a second each."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.asked: list[tuple[int, int, int]] = []
        model = workload.MODELS["tiny"]
        width, heads = model.head, model.heads + 2 * model.kv_heads
        shapes = {
            "embed_tokens": (512, 64), "lm_head": (512, 64), "norm": (64,),
            "input_layernorm": (64,), "post_attention_layernorm": (64,),
            "self_attn.qkv_proj": (heads * width, 64), "self_attn.o_proj": (64, 64),
            "self_attn.q_norm": (width,), "self_attn.k_norm": (width,),
            "mlp.gate_up_proj": (256, 64), "mlp.down_proj": (64, 128),
        }  # fmt: skip
        self.weights = {f"{name}.weight": torch.empty(shape) for name, shape in shapes.items()}
        workload.fill(self.weights.items())

    def generate(self, prompts: engines.Tokens, count: int) -> engines.Tokens:
        self.asked.append((len(prompts), len(prompts[0]), count))
        self.seconds += count
        return [prompt[-1:] * count for prompt in prompts]

    def log_probabilities(
        self, prompts: engines.Tokens, count: int
    ) -> tuple[engines.Tokens, list[list[float]]]:
        tokens = self.generate(prompts, count)
        return tokens, [[-6.0] * count for _ in prompts]

    def weight(self, name: str) -> torch.Tensor:
        layer, _, rest = name.removeprefix("layers.").partition(".")
        return self.weights[rest if layer.isdecimal() else name]


def test_a_process_times_and_profiles_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(worker.time, "perf_counter", lambda: engine.seconds)

    def profile(call: Any, steps: int) -> kernels.KernelTime:
        call()
        return kernels.kernel_time([Interval(begin_ns=0, end_ns=1000 * steps)], steps)

    found = worker.measured(engine, WORK, profile)
    assert {*found["decode"]} == {"1", "4"}
    assert {*found["prefill"]} == {"64"}
    for row, rate in (
        (found["decode"]["1"], 1),
        (found["decode"]["4"], 4),
        (found["prefill"]["64"], 64),
    ):
        assert row["rates"] == [rate] * WORK.repeats
        assert [one["busy_us"] for one in row["kernels"]] == [1.0] * worker.PROFILES
        assert "tokens" not in row
    assert (4, 32, 9) in engine.asked  # timed
    assert (4, 1, worker.PROFILED_STEPS) in engine.asked  # profiled: decodes from the first step
    assert (1, 64, 1) in engine.asked
    assert {*found["digests"]["tokens by batch"]} == {"1", "4"}
    assert found["accuracy"]["prefill"]["rms"] < 1  # of 512 tokens none is likely: log 512 is 6.2
    without = worker.measured(engine, WORK, None)
    assert "kernels" not in without["decode"]["1"]
    assert without["digests"] == found["digests"]


def test_fp32_reference_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = workload.MODELS["tiny"]
    config = transformers.AutoConfig.for_model(**model.config(1))
    stock = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    workload.fill(stock.named_parameters())

    def weight(name: str) -> torch.Tensor:
        for joined, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            if joined in name:
                return torch.cat([weight(name.replace(joined, f"{one}_proj")) for one in parts])
        found: torch.Tensor = stock.get_parameter(
            name if name.startswith("lm_head") else f"model.{name}"
        )
        return found

    sequences = workload.prompts(2, 12)
    found = reference.log_probabilities(model, 1, weight, sequences, 4)
    tokens = torch.tensor(sequences)
    with torch.no_grad():
        every = torch.log_softmax(stock(tokens).logits, -1)[:, -5:-1]
    expected = every.gather(-1, tokens[:, -4:, None]).squeeze(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_table_compares_modes_and_shows_what_is_served() -> None:
    runs = [run("off", "cold"), run("auto", "cold", 1.05), run("auto", "warm", 1.07)]
    runs[2]["digests"]["tokens"] = "others"
    runs[2]["stats"]["while_serving_ms"] = 12.0
    runs[2]["stats"]["failed"] = {"0123456789abcdef": "no memory"}
    lines = table.table(record_of(*runs))
    row = next(line for line in lines if line.startswith("decode, batch 16/rate"))
    assert row.split()[3:] == ["tokens/s", "2,544.0", "2,400.0", "1.060", "0.9", "%"]
    row = next(line for line in lines if line.startswith("decode, batch 16/kernels"))
    assert row.split()[3:] == ["us", "94.3", "100.0", "0.943", "0.9", "%", "60", "%"]
    text = "\n".join(lines)
    assert "1 processes with off, 2 processes with auto" in text
    assert "plug-in's own clock, warm: 0.50 s\nand while serving at most 12 ms" in text
    assert lines.count("nvgemm-aot: bundled kernels serve 5 of 5") == 1
    assert "different digests of choices: off 1 in 1, auto 1 in 2 processes" in text
    assert "different digests of tokens: off 1 in 1, auto 2 in 2 processes" in text
    assert "kernel 0123456789ab was left to ATen: no memory" in text


def test_records_have_each_figure_over_stock() -> None:
    record = record_of(run("off", "cold"), run("auto", "cold", 1.05), run("auto", "warm", 1.07))
    found = {case.name: case for case in cases.serving_cases(record)}
    rate = found["vllm/tiny, 2 layers/decode, batch 16/rate"]
    assert (rate.figure, rate.unit) == (pytest.approx(2544), "tokens/s")
    assert rate.baseline is not None
    assert (rate.baseline.name, rate.baseline.value) == ("stock vllm 0.26.0", 2400)
    assert found["vllm/tiny, 2 layers/decode, batch 16/served"].figure == pytest.approx(60)
    assert found["vllm/tiny, 2 layers/inside nvgemm-aot, cold"].figure == 0.5
    assert found["vllm/tiny, 2 layers/inside nvgemm-aot, while serving"].figure == 0
    assert "vllm/tiny, 2 layers/start, warm" not in found  # no stock process was warm
    same = found["vllm/tiny, 2 layers/auto/different digests of choices"]
    assert same.baseline is not None
    assert (same.figure, same.baseline.value) == (1, 2)


def test_page_has_a_row_for_each_size() -> None:
    record = record_of(run("off", "cold"), run("auto", "cold", 1.05), run("auto", "warm", 1.07))
    record["workload"] |= {"model": "llama-3.1-8b", "layers": 32}
    conditions = run_of("serving", record["runs"][0]["versions"], date="2026-11-27")
    records = Selection(records_of(conditions, cases.serving_cases(record)))
    assert serving_table.serving(records).splitlines()[3] == (
        "| vllm | llama-3.1-8b, 32 layers | decode, batch 16 | H100 | 2,544 | 2,400 "
        "| 1.060\N{MULTIPLICATION SIGN} | 1.060\N{MULTIPLICATION SIGN} | 60 % |"
    )
    assert serving_table.decode(records, 16).only().speedup == pytest.approx(1.06)
    assert len(serving_table.decode(Selection([]), 16)) == 0


def test_answers_are_apart_from_what_libraries_print() -> None:
    code = (
        "import os\n"
        "from benchmarks.serving import worker\n"
        "worker._keep_answers_apart()\n"
        "send = worker.answering()\n"
        "os.write(1, b'[Gloo] Rank 0 is connected\\n')\n"
        "send({'answer': 1})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == '{"answer": 1}\n'
    assert "[Gloo]" in done.stderr


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces processes by made-up answers; returns the labels of those asked for."""
    asked: list[str] = []

    def measure(process: Process, *_: Any) -> dict[str, Any]:
        asked.append(process.label)
        return run(process.mode.value, process.start.value)

    monkeypatch.setattr(serving, "measure", measure)
    monkeypatch.setattr(serving, "read_from_disk", lambda _: None)
    monkeypatch.setattr(engines.EngineKind, "require_installed", lambda _: None)
    return asked


def arguments(path: Path, *more: str) -> list[str]:
    return ["--device", "cpu", "--model", "tiny", "--json", str(path), *more]


def test_continues_with_a_file_and_refuses_another_workload(
    tmp_path: Path, measured: list[str]
) -> None:
    path = tmp_path / "serving.json"
    done = CliRunner().invoke(serving.main, arguments(path, "--repeat", "1"))
    assert done.exit_code == 0, done.output
    assert measured == ["off, cold", "auto, cold"]
    assert {record.case.unit for record in read_records(path.with_suffix(".jsonl"))} >= {
        "tokens/s", "us", "s", "MB", "nats", "digests"
    }  # fmt: skip
    shown = CliRunner().invoke(serving.main, ["--show", str(path)])
    assert shown.output == path.with_suffix(".txt").read_text()
    again = CliRunner().invoke(serving.main, arguments(path))
    assert again.exit_code == 1
    assert "is there already; give --resume" in again.output
    other = CliRunner().invoke(serving.main, arguments(path, "--resume", "--tokens", "16"))
    assert other.exit_code == 1
    assert "has tokens 128, and here it is 16; measure into another file" in other.output
    measured.clear()
    more = CliRunner().invoke(serving.main, arguments(path, "--resume"))
    assert more.exit_code == 0, more.output
    assert measured == ["auto, cold", "auto, warm", "off, cold", "off, warm"]
    record = json.loads(path.read_text())
    assert len(record["runs"]) == 6
    assert len(record["commands"]) == 2


def test_a_mode_that_fails_is_not_tried_again(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = serving.measure

    def measure(process: Process, *others: Any) -> dict[str, Any]:
        found = usual(process, *others)
        found["versions"]["bundles"] = []
        return found

    monkeypatch.setattr(serving, "measure", measure)
    path = tmp_path / "serving.json"
    done = CliRunner().invoke(serving.main, arguments(path))
    assert done.exit_code == 1
    assert "auto, cold FAILED: no usable bundle was found" in done.output
    assert done.output.endswith("Error: auto FAILED, for the reasons above\n")
    assert measured == ["off, cold", "auto, cold", "off, warm", "off, cold"]


def test_runs_of_other_engines_and_bundles_are_not_mixed() -> None:
    first, other = run("auto", "cold"), run("auto", "warm")
    serving.refuse_unusable([first, run("off", "cold")], other)
    other["versions"]["bundles"] = ["wheel: c"]
    with pytest.raises(click.ClickException, match="bundles"):
        serving.refuse_unusable([first], other)
    other["versions"] |= {"bundles": ["wheel: b"], "engine": "0.27.0"}
    with pytest.raises(click.ClickException, match=r"have engine 0\.26\.0, and this one 0\.27\.0"):
        serving.refuse_unusable([first], other)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--model", "gpt"], 2, "'gpt' is not one of 'llama-3.1-8b', 'qwen3-8b', 'tiny'"),
        (["--engine", "sglang"], 2, "'sglang' is not one of 'vllm', 'transformers'"),
        (["--batches", "1,x"], 2, "must be different positive numbers"),
        (["--prefills", "131072"], 2, "need 131136 positions; llama-3.1-8b has 131072"),
        (["--resume"], 2, "--resume goes on with the file of --json; name one"),
        (["--engine", "vllm"], 1, "vllm is not installed here: install it beside nvgemm-aot"),
    ],
)
def test_refuses_what_cannot_be_measured(
    options: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = CliRunner().invoke(serving.main, options)
    assert done.exit_code == code
    assert said in done.output


def test_engines_keep_to_the_directory_and_the_process(tmp_path: Path) -> None:
    found = engines.environment(tmp_path, WORK)
    assert found["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["TORCHINDUCTOR_DETERMINISTIC"] is None


class FakeLLM:
    """vLLM's class, as far as the benchmark calls it."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        FakeLLM.options = options

    def apply_model(self, function: Any) -> None:
        inner = torch.nn.Module()
        inner.norm = torch.nn.Linear(4, 4, bias=False)
        model = torch.nn.Module()
        model.model, model.lm_head = inner, torch.nn.Linear(4, 8, bias=False)
        function(model)

    def generate(self, requests: list[Any], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        assert sampling.ignore_eos
        assert not sampling.detokenize
        assert not use_tqdm
        tokens = range(sampling.max_tokens)
        steps = [{token: SimpleNamespace(logprob=-float(token)), 99: None} for token in tokens]
        one = SimpleNamespace(token_ids=tuple(tokens), logprobs=sampling.logprobs and steps)
        return [SimpleNamespace(outputs=[one]) for _ in requests]


def test_vllm_gets_the_model_and_a_cache_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    engine = engines.ENGINES["vllm"].start(WORK, tmp_path)
    assert FakeLLM.options.keys() == {
        "model", "skip_tokenizer_init", "load_format", "dtype", "seed", "max_model_len",
        "max_num_seqs", "kv_cache_memory_bytes", "enable_prefix_caching", "disable_log_stats",
    }  # fmt: skip
    config = json.loads((Path(FakeLLM.options["model"]) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert engine.generate([[5], [6]], 3) == [[0, 1, 2], [0, 1, 2]]
    assert engine.log_probabilities([[5]], 2) == ([[0, 1]], [[0.0, -1.0]])
    assert engine.weight("norm.weight").unique().tolist() == [1.0]
    assert 0 < engine.weight("lm_head.weight").abs().max() < 0.2


def test_workload_reads_what_it_writes() -> None:
    assert workload.Workload.from_json(json.loads(json.dumps(WORK.to_json()))) == WORK
    assert WORK.cache_bytes == 2**30
    assert len({tuple(one) for one in workload.prompts(256, 32)}) == 256


def test_a_plugins_messages_are_kept_when_an_engine_configures_logging() -> None:
    said = worker.Said()
    logger = logging.getLogger("made_up_engine.nvgemm_aot")
    logger.addFilter(said)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "loggers": {"made_up_engine": {"level": "INFO", "propagate": False}},
        }
    )
    logger.info("bundled kernels serve %d of 5", 5)
    assert said.lines == ["bundled kernels serve 5 of 5"]


def test_settings_are_in_the_processes_the_table_and_the_records(tmp_path: Path) -> None:
    plain, fusing = WORK, replace(WORK, is_fusing=True)
    assert engines.environment(tmp_path, plain)["NVGEMM_AOT_FUSE"] is None
    assert engines.environment(tmp_path, fusing)["NVGEMM_AOT_FUSE"] == "1"
    record = {
        **record_of(run("off", "cold"), run("auto", "cold", 1.1)),
        "workload": fusing.to_json(),
    }
    assert "with NVGEMM_AOT_FUSE=1" in table.table(record)
    names = {one.name for one in cases.serving_cases(record)}
    assert all(name.startswith("vllm/tiny, 2 layers, gates fused/") for name in names)
