"""What became of each GEMM of a command: gathered, printed, and seen in real runs of it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import signal
import subprocess
import sys
import termios
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cpu_provider
import recording_kernels
from nvgemm_aot.cli.programs.explain import explain_text
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.workload.decisions import GemmReport, collect, explain_program
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.inductor import report
from nvgemm_runtime.settings import EXPLAIN_VARIABLE

Command = Callable[..., subprocess.CompletedProcess[str]]
Line = dict[str, Any]


def met(gemm: str, *reasons: str, offered: dict[str, str] | None = None) -> Line:
    basis = "declared" if offered else "miss"
    return {
        "event": "met",
        "gemm": gemm,
        "basis": basis,
        "reasons": list(reasons),
        "offered": offered or {},
        "measured": "",
        "doubtful": [],
        "unconfirmed": [],
    }


def timed(gemm: str, **times_ms: float) -> Line:
    return {"event": "timed", "gemm": gemm, "times_ms": times_ms}


def used(gemm: str, name: str) -> Line:
    return {"event": "used", "gemm": gemm, "name": name}


def text_of(*events: Line, **others: object) -> str:
    gemms = [gemm.to_json() for gemm in collect(events)]
    document = {"status": 0, "interpreter": None, "unreadable_lines": 0, "failed": {}}
    return explain_text({**document, "gemms": gemms, **others})


def row_of(text: str, gemm: str) -> list[str]:
    """The cells of a GEMM's row, which two blanks or more separate."""
    (line,) = [line for line in text.splitlines() if line.startswith(gemm)]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


OURS = {"nvgemm_mm_1": "Tile_16x16"}


def test_collects_all_that_happened_to_a_gemm() -> None:
    one, other = collect(
        [
            met("a", offered=OURS),
            met("b", "no bundle"),
            timed("a", mm=0.5, nvgemm_mm_1=0.25),
            met("a", offered={"nvgemm_mm_2": "Tile_8x8"}),
            used("a", "nvgemm_mm_1"),
            used("a", "nvgemm_mm_1"),
        ]
    )
    assert one == GemmReport(
        gemm="a",
        basis="declared",
        offered={**OURS, "nvgemm_mm_2": "Tile_8x8"},
        graphs=2,
        times_ms={"mm": 0.5, "nvgemm_mm_1": 0.25},
        used={"nvgemm_mm_1": 2},
    )
    assert one.fastest == "nvgemm_mm_1"
    assert (other.basis, other.reasons, other.fastest) == ("miss", ["no bundle"], None)


def test_a_miss_does_not_hide_that_kernels_were_offered_before() -> None:
    (gemm,) = collect([met("a", offered=OURS), met("a", "strides"), met("a", "strides")])
    assert (gemm.basis, gemm.offered, gemm.reasons) == ("declared", OURS, ["strides"])


def test_a_choice_that_failed_is_never_the_fastest_and_null_in_json() -> None:
    (gemm,) = collect([timed("a", mm=0.5, broken=math.inf)])
    document = gemm.to_json()
    assert document["fastest"] == "mm"
    assert document["times_ms"] == {"mm": 0.5, "broken": None}
    (failed,) = collect([timed("a", broken=math.inf)])
    assert failed.fastest is None


def test_text_says_what_is_known_of_the_code() -> None:
    text = text_of(
        met("lost", offered=OURS),
        timed("lost", mm=0.25, nvgemm_mm_1=0.5),
        met("fastest yet unused", offered=OURS),
        timed("fastest yet unused", mm=0.5, nvgemm_mm_1=0.25),
        met("offered, not timed", offered=OURS),
        met("alone", "no bundle"),
        met("sometimes", offered=OURS),
        met("sometimes", offered=OURS),
        used("sometimes", "nvgemm_mm_1"),
    )
    assert row_of(text, "lost")[-1] == "mm"
    assert row_of(text, "fastest yet")[-1] == "another choice"
    assert row_of(text, "offered, not")[-3:] == ["-", "-", "not timed"]
    assert row_of(text, "alone")[-3:] == ["-", "-", "the only choice"]
    assert row_of(text, "sometimes")[-1] == "nvgemm_mm_1 (1 of 2)"
    assert "5 GEMMs: 1 on bundled kernels, 3 on others though" in text
    assert "offered, 1 without a bundled kernel" in text


def test_what_was_tried_and_lost_is_shown_and_not_counted() -> None:
    fused, stays = "mm/tn/bf16xbf16/fp32/bf16/bias_silu/m16n32k64", "a sum"
    events = [
        timed(fused, ours=0.03, nvgemm_aot_unfused_0=0.02),
        met(stays, "why"),
        {**met(fused, offered={"ours": "Operator"}), "event": "tried"},
    ]
    assert [(gemm.gemm, gemm.graphs, gemm.basis) for gemm in collect(events)] == [
        (fused, 0, "declared"),
        (stays, 1, "miss"),
    ]
    text = text_of(*events)
    what = "tried, slower than separate operations"
    assert row_of(text, fused)[1:] == ["0", "declared", "1", "30.0", "20.0", what]
    assert "1 GEMM: 0 on bundled kernels, 0 on others" in text


def test_equal_reasons_are_said_once_and_lines_stay_short() -> None:
    reasons = ["no bundle is for this GPU", "one", "two", "three", "four"]
    names = [f"mm/tn/bf16xbf16/fp32/bf16/m{m}n4096k4096" for m in range(100, 190)]
    text = text_of(*(met(name, *reasons) for name in names), met("other, one", "a bias"))
    assert text.count(reasons[0]) == 1
    assert "no bundled kernel for 90 GEMMs:" in text
    assert "… and 2 more reasons (--json has them all)" in text
    assert "no bundled kernel for 1 GEMM:\n  other, one\nbecause\n  a bias" in text
    assert max(map(len, text.splitlines())) <= 120
    for name in names:
        assert text.count(name) == 2, "in the table and with its reasons"


def test_a_long_name_is_whole_only_below_the_table() -> None:
    name = f"mm of {'torch.float64[64, 64], ' * 10}"
    table, below = text_of(met(name, "fp64")).split("\n\n", 1)
    assert "…" in table
    assert max(map(len, table.splitlines())) <= 130
    assert name in below


def test_text_without_a_gemm_lists_what_may_be_why() -> None:
    text = text_of()
    assert "max-autotune" in text
    assert "NVGEMM_AOT=off" in text
    assert "has no GEMM" in text
    assert "torch.compile reported no GEMM" not in text_of(unreadable_lines=1)


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [
        json.dumps(met("a", "no bundle")),
        '{"event": "met", "gemm": "b", "basis": "mi',
        '{"event": "met", "gemm": "c"}',
        json.dumps({**met("e"), "doubtful": "a.nvgemm"}),
        '{"event": "dreamt", "gemm": "d"}',
        "[1]",
        "\0",
        json.dumps(timed("a", mm=math.inf)),
        '{"event": "timed"',
    ]
    events = tmp_path / "events"
    events.write_text("\n".join(lines))
    document = explain_program(["sh", "-c", f'cat "{events}" >"${EXPLAIN_VARIABLE}"'])
    assert [gemm["gemm"] for gemm in document["gemms"]] == ["a"]
    assert document["unreadable_lines"] == 7


@pytest.mark.parametrize("came_up", [True, False])
def test_a_kernel_that_failed_is_shown_with_its_reason(tmp_path: Path, came_up: bool) -> None:
    program = (
        "from nvgemm_runtime.launch.compiled import leave_to_aten\n"
        "for _ in range(2): leave_to_aten('a wheel', 'f' * 64, 'no\\nimage')"
    )
    document = explain_program([sys.executable, "-c", program])
    assert document["failed"] == {"f" * 64: "no\nimage"}
    text = text_of(*([met("a")] if came_up else []), failed=document["failed"])
    assert f"so that ATen computes their GEMMs:\n  {'f' * 12}  no image" in text


@pytest.mark.slow
def test_events_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    events = tmp_path / "events"
    program = (
        "import sys; from nvgemm_runtime.inductor import report\n"
        "for turn in range(50): report.met(sys.argv[1], basis='miss', reasons=['why' * 50_000])"
    )
    environment = {**os.environ, EXPLAIN_VARIABLE: str(events)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, name], env=environment) for name in "abc"
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    gemms = collect(json.loads(line) for line in events.read_text().splitlines())
    assert {gemm.gemm: gemm.graphs for gemm in gemms} == {"a": 50, "b": 50, "c": 50}


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(EXPLAIN_VARIABLE, str(tmp_path))
    report.used("a", "nvgemm_mm_1", "1" * 64)
    report.used("b", "nvgemm_mm_1", "1" * 64)
    (record,) = (one for one in caplog.records if one.name.startswith("nvgemm"))
    assert str(tmp_path) in record.getMessage()


def test_nothing_is_written_where_nobody_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EXPLAIN_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    report.used("a", "nvgemm_mm_1", "1" * 64)
    assert not list(tmp_path.iterdir())


def test_neither_torch_nor_the_compiler_is_imported() -> None:
    program = (
        "import sys, nvgemm_aot.workload.decisions, nvgemm_aot.cli.programs.explain\n"
        "import nvgemm_runtime.settings\n"
        "print({'torch', 'cutlass'} & {name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs ``nvgemm-aot explain`` in a process of its own."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("NVGEMM_AOT")}
        return subprocess.run(
            [sys.executable, "-m", "nvgemm_aot", "explain", *arguments],
            env={**inherited, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_command_without_gemms(command: Command) -> None:
    done = command("--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.returncode == 7
    said = "the command exited with status 7 before compiling a GEMM"
    assert done.stdout == f"out\n{said}\n"
    assert done.stderr == "err\n"
    done = command("--", "true")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("torch.compile reported no GEMM")


def test_a_python_without_torch_is_named(command: Command, tmp_path: Path) -> None:
    """As the one that ``python`` names where no environment is active."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare/bin/python"
    done = command("--", str(python), "-c", "import torch", PYTHONPATH="")
    assert done.returncode == 1
    assert done.stdout == (
        "the command exited with status 1 before compiling a GEMM (interpreter: "
        f"{python}, Python {platform.python_version()}, without torch and nvgemm-aot)\n"
    )


def test_json_is_alone_on_standard_output(command: Command) -> None:
    done = command("--json", "--", "sh", "-c", "echo out; exit 7")
    assert json.loads(done.stdout) == {
        "status": 7,
        "interpreter": None,
        "unreadable_lines": 0,
        "gemms": [],
        "failed": {},
    }
    assert (done.returncode, done.stderr) == (7, "out\n")


@pytest.mark.parametrize(("name", "why"), [("./missing", "No such file"), ("/", "Permission")])
def test_a_command_that_cannot_be_started(command: Command, name: str, why: str) -> None:
    done = command("--", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot run {name}: {why}" in done.stderr


def test_events_that_a_signal_cut_off_are_said_on_standard_error(command: Command) -> None:
    write = f'printf "{{" >>"${EXPLAIN_VARIABLE}"; kill -KILL $$'
    done = command("--json", "--", "sh", "-c", write)
    document = json.loads(done.stdout)
    assert (document["status"], document["unreadable_lines"]) == (137, 1)
    assert done.returncode == 128 + signal.SIGKILL
    assert "nvgemm-aot: ignored 1 event with unreadable lines" in done.stderr


def test_a_command_that_is_interrupted_is_still_explained(tmp_path: Path) -> None:
    program = (
        "import time; from nvgemm_runtime.inductor import report\n"
        "report.met('some GEMM', basis='miss', reasons=['why'])\n"
        "try: print('ready', flush=True); time.sleep(3600)\n"
        "except KeyboardInterrupt: raise SystemExit(3)\n"
    )
    # A job in the background has interrupts ignored, and so would what it starts.
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from nvgemm_aot.cli.main import main; main()"
    )
    keyboard, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", start, "explain", "--", sys.executable, "-c", program],
        stdin=terminal,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.write(keyboard, b"\x03")
    output, _ = process.communicate(timeout=600)
    os.close(keyboard)
    os.close(terminal)
    assert process.returncode == 3
    assert "no bundled kernel for 1 GEMM:\n  some GEMM\nbecause\n  why" in output


_MODEL = """
import gc; gc.disable()  # as in `fresh_processes`
import time, torch
gc.freeze(); gc.enable()
from torch._inductor.select_algorithm import extern_kernels

extern_kernels.mm = lambda *arguments, **options: (
    time.sleep(0.02), torch.mm(*arguments, **options)
)[1]

def model(a, b, half_a, half_b, double_a, double_b, bias):
    return a @ b, half_a @ half_b, double_a @ double_b, torch.addmm(bias, a, b, alpha=2)

a, b = torch.randn(16, 64), torch.randn(64, 32)
arguments = a, b, a.half(), b.half(), a.double(), b.double(), torch.randn(16, 32)
results = torch.compile(model, mode="max-autotune")(*arguments)
for result, expected in zip(results, model(*arguments)):
    torch.testing.assert_close(result, expected, atol=0.1, rtol=0.01)
print("the model's own words")
gc.freeze()
raise SystemExit(5)
"""
"""ATen loses by 20 ms; the kernel for fp16 takes 100."""

_WON, _LOST = "mm/tt/fp32xfp32/fp32/fp32/m16n32k64", "mm/tt/fp16xfp16/fp32/fp16/m16n32k64"


@pytest.fixture(scope="module")
def sleeping_half(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """A kernel for fp16 that loses."""
    return recording_kernels.build_recording(
        [cpu_provider.problem(operand=DType.FP16)],
        tmp_path_factory.mktemp("sleeping-half"),
        kernel_cache,
        recording_kernels.Sleeping(),
    )


@pytest.mark.slow
def test_a_model_that_is_compiled(
    command: Command,
    recording_bundle: BuiltBundle,
    sleeping_half: BuiltBundle,
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    done = command(
        "--json",
        "--",
        sys.executable,
        "model.py",
        NVGEMM_AOT_BUNDLES=os.pathsep.join(map(str, (recording_bundle.path, sleeping_half.path))),
        TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS="ATEN",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "caches"),
    )
    assert done.returncode == 5, done.stderr
    assert "the model's own words" in done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == 5
    gemms = {gemm["gemm"]: gemm for gemm in document["gemms"]}
    won, lost = gemms.pop(_WON), gemms.pop(_LOST)
    assert (won["basis"], won["graphs"]) == ("declared", 1)
    assert won["used"] == {won["fastest"]: 1}
    assert list(won["offered"]) == [won["fastest"]]
    assert (lost["basis"], lost["fastest"], lost["used"]) == ("declared", "mm", {})
    assert len(lost["offered"]) == 1
    assert {gemm["basis"] for gemm in gemms.values()} == {"miss"}
    assert all(gemm["reasons"] for gemm in gemms.values())
    addmm, fp64 = sorted(gemms)
    assert fp64.startswith("mm of torch.float64[16, 64]")
    assert addmm.startswith("addmm of torch.float32[16, 64]")


@pytest.mark.slow
def test_a_model_with_the_plug_in_off(
    command: Command, recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    done = command(
        "--",
        sys.executable,
        "model.py",
        NVGEMM_AOT="off",
        NVGEMM_AOT_BUNDLES=str(recording_bundle.path),
        TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS="ATEN",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    assert done.returncode == 5, done.stderr
    assert "exited with status 5 before compiling a GEMM" in done.stdout
