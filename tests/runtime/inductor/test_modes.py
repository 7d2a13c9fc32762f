"""Modes of compiling, and what is counted and told of what was compiled."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config

import nvgemm_runtime
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.errors import SettingError
from nvgemm_runtime.gemm.problem import Problem

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("counted_anew")

REQUIRED = {"options": {"nvgemm_aot_mode": "required"}}


@pytest.fixture(scope="module")
def uncovered() -> tuple[Tensor, Tensor]:
    """Of a type for which there is no kernel."""
    return torch.randn(16, 64).double(), torch.randn(64, 32).double()


def refusal(inductor: InductorSession, function: Any, *operands: Any, **options: Any) -> str:
    """Why a compilation fails: all that torch says, which has the message of our error in it."""
    with pytest.raises(torch._inductor.exc.InductorError) as caught:
        inductor.compile(function, *operands, **options)
    return str(caught.value)


def test_what_is_covered_compiles_where_kernels_are_required(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.slow_down_aten()
    with inductor.watch_choices() as seen:
        compiled = inductor.compile(torch.mm, *operands, **REQUIRED)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert len(compiled.launched) == 1
    assert seen[0][0] == "mm", "ATen competes all the same"


def test_a_missing_kernel_is_named_with_the_lines_that_declare_it(
    inductor: InductorSession, tmp_path: Path
) -> None:
    inductor.use()
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16().t()
    message = refusal(inductor, torch.mm, a, b, **REQUIRED)
    assert "RequiredError: mm/tn/bf16xbf16/fp32/bf16/m16n32k64: no prebuilt kernel" in message
    assert "no bundle is installed" in message
    manifest = tmp_path / "missing.yaml"
    head = "version: 1\nname: missing\ntargets: [sm_90a]\ngemms:\n"
    line = next(line for line in message.splitlines() if line.strip().startswith("- {op"))
    manifest.write_text(head + line)
    (declared,) = load_manifest(manifest).declared
    assert declared.problem == Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m16n32k64")


def test_a_gemm_that_nothing_can_declare_is_an_error_too(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    def doubled(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(bias, a, b, alpha=2)

    message = refusal(inductor, doubled, torch.randn(32), *operands, **REQUIRED)
    assert "addmm of torch.float32[16, 64]" in message
    assert "alpha is 2, must be 1" in message


def test_without_max_autotune_nothing_is_required(
    inductor: InductorSession, uncovered: tuple[Tensor, Tensor]
) -> None:
    with config.patch(max_autotune_gemm=False):
        compiled = inductor.compile(torch.mm, *uncovered, **REQUIRED)
    torch.testing.assert_close(compiled.result, torch.mm(*uncovered))


@pytest.mark.parametrize("how", ["option", "block"])
def test_off_for_one_compilation(
    inductor: InductorSession, operands: tuple[Tensor, Tensor], how: str
) -> None:
    inductor.slow_down_aten()
    if how == "option":
        compiled = inductor.compile(torch.mm, *operands, options={"nvgemm_aot_mode": "off"})
    else:
        with nvgemm_runtime.mode("off"):
            compiled = inductor.compile(torch.mm, *operands)
    assert "nvgemm" not in compiled.code[0]
    assert nvgemm_runtime.stats().met == 0
    torch._dynamo.reset()
    assert len(inductor.compile(torch.mm, *operands).launched) == 1, "its cache entry is its own"


def test_a_mistake_of_ours_is_no_way_around_it(
    inductor: InductorSession, operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvgemm_runtime.inductor import offers

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("on purpose")

    monkeypatch.setattr(offers, "find_offers", fail)
    message = refusal(inductor, torch.mm, *operands, **REQUIRED)
    assert "RequiredError: mm into torch.float32[16, 32]" in message
    assert "internal error in nvgemm-aot: OSError: on purpose" in message
    torch._dynamo.reset()
    nvgemm_runtime.reset_stats()
    inductor.compile(torch.mm, *operands)
    assert nvgemm_runtime.stats().misses == {"internal error in nvgemm-aot: OSError: on purpose": 1}


def test_a_kernel_that_cannot_join_is_no_reason_for_a_manifest(
    inductor: InductorSession, operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_MAX_CHOICES", "0")
    message = refusal(inductor, torch.mm, *operands, **REQUIRED)
    assert "NVGEMM_AOT_MAX_CHOICES=0 allows no kernels" in message
    assert "a manifest cannot declare it" in message
    assert "- {op" not in message


def test_a_block_requires_and_then_no_more(
    inductor: InductorSession, uncovered: tuple[Tensor, Tensor]
) -> None:
    with nvgemm_runtime.mode("required"):
        assert "RequiredError: mm" in refusal(inductor, torch.mm, *uncovered)
        with nvgemm_runtime.mode("auto"):
            inductor.compile(torch.mm, *uncovered)
    torch._dynamo.reset()
    inductor.compile(torch.mm, *uncovered)


def test_a_mode_that_is_none_is_an_error_wherever_it_is_given(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    allowed = "'requird'; allowed are auto, required, off"
    with pytest.raises(SettingError, match=allowed), nvgemm_runtime.mode("requird"):
        pass
    message = refusal(inductor, torch.mm, *operands, options={"nvgemm_aot_mode": "requird"})
    assert f"SettingError: nvgemm_aot_mode is {allowed}" in message


PROGRAM = """
import gc; gc.disable()  # as in `fresh_processes`
import sys, torch
gc.freeze(); gc.enable()
a, b = torch.randn(16, 64).double(), torch.randn(64, 32).double()
run = torch.compile(lambda a, b: a @ b, options={"max_autotune_gemm": True, **OPTIONS})
try:
    run(a, b)
    print("compiled")
except Exception as error:
    print("RequiredError" in str(error))
print(sorted({"nvgemm_aot", "nvMatmulHeuristics"} & {name.split(".")[0] for name in sys.modules}))
try:
    import nvgemm_runtime
    with nvgemm_runtime.mode("auto"):
        print("here")
except nvgemm_runtime.errors.SettingError as error:
    print("not here")
gc.freeze()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "options", "said"),
    [
        ("required", "{}", ["True", "[]", "here"]),
        ("off", "{}", ["compiled", "[]", "not here"]),
    ],
)
def test_the_variable_sets_it_for_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, options: str, said: list[str]
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", variable)
    monkeypatch.setenv("NVGEMM_AOT_JIT_CANDIDATES", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", f"OPTIONS = {options}\n{PROGRAM}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-3:] == said, done.stderr[-2000:]


@pytest.mark.slow
def test_what_was_compiled_is_counted_and_said_in_a_line(
    inductor: InductorSession,
    recording_bundle: BuiltBundle,
    operands: tuple[Tensor, Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="nvgemm_runtime")
    inductor.slow_down_aten()
    a, b = operands

    def model(a: Tensor, b: Tensor) -> Any:
        return a @ b, a[:8] @ b, a.double() @ b.double()

    inductor.compile(model, a, b)
    stats = nvgemm_runtime.stats()
    assert (stats.met, stats.declared + stats.signature, stats.missed) == (3, 2, 1)
    assert stats.signature >= 1, "eight rows are declared by nobody"
    (reason,) = stats.misses
    assert "fp64" in reason or "float64" in reason
    assert sum(stats.won.values()) == 2
    assert set(stats.won) <= {kernel.id for kernel in recording_bundle.header.kernels}
    assert stats.milliseconds.keys() - {"loading"} == {"matching", "timing"}
    lines = [line for line in caplog.messages if line.startswith("compiled ")]
    assert lines == [f"compiled {stats}"]
    torch._dynamo.reset()  # forgets who wants to know of the end of a compilation
    inductor.compile(lambda a, b: (a @ b) * 2, a, b)
    lines = [line for line in caplog.messages if line.startswith("compiled 1 GEMM:")]
    assert len(lines) == 1
    assert not warnings_of(caplog)


def test_torch_s_trace_has_a_record_of_each_gemm(
    inductor: InductorSession, operands: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    inductor.slow_down_aten()
    caplog.set_level(logging.DEBUG, logger="torch.__trace")
    inductor.compile(torch.mm, *operands)
    events = [
        json.loads(record.payload)
        for record in caplog.records
        if getattr(record, "metadata", {}).get("artifact", {}).get("name") == "nvgemm_aot"
    ]
    assert [event["event"] for event in events] == ["met", "timed", "used"]
    assert {event["gemm"] for event in events} == {"mm/tt/fp32xfp32/fp32/fp32/m16n32k64"}
    assert events[2]["name"] in events[0]["offered"]
