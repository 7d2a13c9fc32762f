"""``nvgemm-aot record``: what a command meets, and, under fake tensors, what it calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvgemm_aot.cli.main import main
from nvgemm_aot.workload.record_program import _with_fake_tensors
from nvgemm_runtime.errors import RecordError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.recording.recorder import Recorder

_START = [sys.executable, "-m", "nvgemm_aot", "record"]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts ``nvgemm-aot record -o out.yaml`` in a process of its own."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("NVGEMM_AOT")}
        return subprocess.Popen(
            [*_START, "-o", "out.yaml", *arguments],
            env={
                **inherited,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def counts(directory: Path) -> dict[str, int]:
    recording = Recorder(directory / "out.yaml").read()
    return {problem.key: count for problem, count in recording.problems.items()}


_COMPILING = """
import torch
a, b = torch.ones(16, 64, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)
bias = torch.ones(32, dtype=torch.bfloat16)
torch.compile(lambda a, b: (a @ b, (a + 1) @ b, torch.addmm(bias, a, b)))(a, b)
print("the program's own words")
raise SystemExit(5)
"""


@pytest.mark.slow
def test_commands_at_once_share_a_file_that_is_built_from_unchanged(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(_COMPILING)
    command = ("--target", "sm_100f", "--", sys.executable, "model.py")
    for process in [start(*command), start(*command)]:
        output, said = process.communicate()
        assert (process.returncode, output) == (5, "the program's own words\n"), said
        assert f"nvgemm-aot: {tmp_path}/out.yaml: " in said
    assert counts(tmp_path) == {
        "mm/tt/bf16xbf16/fp32/bf16/m16n32k64": 4,
        "mm/tt/bf16xbf16/fp32/bf16/bias/m16n32k64": 2,
    }
    arguments = ["build", str(tmp_path / "out.yaml"), "--dry-run", "--cache-dir", str(tmp_path)]
    planned = CliRunner().invoke(main, arguments)
    assert planned.exit_code == 0, planned.output
    assert "2 problems" in planned.output


_TRAINING = """
import torch
import torch._inductor.compile_fx  # before the operators of experts
from nvgemm_runtime.moe import experts

def leaf(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

x, w1, w3, w2 = leaf(48, 96), leaf(4, 32, 96), leaf(4, 32, 96), leaf(4, 96, 32)
ends = torch.tensor([10, 10, 40, 48])
step = torch.compile(lambda x, w1, w3, w2: experts(x, (w1, w3), w2, ends))
out = step(x, w1, w3, w2)
out.backward(torch.ones_like(out))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fake", [(), ("--fake",)], ids=["compiled", "fake"])
def test_a_training_step_of_experts_is_recorded_and_can_be_built(
    fake: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_TRAINING)
    command = [*fake, "--target", "sm_90a", "--", sys.executable, "-W", "ignore", "train.py"]
    process = start(*command)
    _, said = process.communicate()
    assert process.returncode == 0, said
    product = "bf16xbf16/fp32/bf16"
    assert counts(tmp_path) == {
        f"grouped_mm/tn/{product}/g4m48n32k96": 2,
        f"grouped_mm/tn/{product}/g4m48n96k32": 1,
        f"grouped_mm/tt/{product}/g4m48n96k32": 2,
        f"grouped_mm/tt/{product}/g4m48n32k96": 1,
        f"k_grouped_mm/nt/{product}/g4m32n96k48": 2,
        f"k_grouped_mm/nt/{product}/g4m96n32k48": 1,
    }
    arguments = ["build", str(tmp_path / "out.yaml"), "--dry-run", "--cache-dir", str(tmp_path)]
    planned = CliRunner().invoke(main, arguments)
    assert planned.exit_code == 0, planned.output
    assert "6 problems" in planned.output


_ADDING = """
import os
from pathlib import Path
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.recording.recorder import Recorder
recorder = Recorder(Path(os.environ["NVGEMM_AOT_RECORD"]))
for m in (16, 16, 32):
    recorder.add(Problem.parse(f"mm/tn/bf16xbf16/fp32/bf16/m{m}n64k64"), "sm_90a")
recorder.add("an odd one", "sm_90a")
"""


def test_the_summary_is_of_this_run(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    Recorder(path).add(Problem.parse("mm/tn/bf16xbf16/fp32/bf16/m16n64k64"), "sm_90a")
    arguments = ["record", "-o", str(path), "--", sys.executable, "-c", _ADDING]
    assert CliRunner().invoke(main, arguments).stderr == (
        f"nvgemm-aot: {path}: 3 GEMMs recorded, 2 distinct, 1 new in the file; without "
        "a kernel to build: 1 (1 distinct), listed in the file's last lines\n"
    )


_FAKE = """
import sys, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16384, 65536, bias=False)
        self.down = torch.nn.Linear(65536, 16384, bias=False)
        self.attention = torch.nn.MultiheadAttention(64, 2, batch_first=True)
        self.tied = torch.nn.Linear(16384, 65536, bias=False)
        self.tied.weight = self.up.weight

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) + self.tied(x))

model = torch.compile(Model().to("cuda", torch.bfloat16), mode="max-autotune")
x = torch.randn(4, 8, 16384, dtype=torch.bfloat16, device="cuda:0")
model(x).backward(torch.ones(4, 8, 16384, dtype=torch.bfloat16).cuda())
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    torch.nn.Linear(64, 32, bias=False, device=torch.device("cuda"))(torch.zeros(16, 64).to(0))
torch.set_default_device("cuda")
with torch.inference_mode():
    torch.bmm(torch.zeros(2, 16, 64).half(), torch.zeros(2, 32, 64).half().mT)
torch.cuda.synchronize()
print(sys.argv, torch.cuda.is_available())
raise SystemExit(7)
"""
"""Its weights are 8 GB."""


@pytest.mark.slow
def test_under_fake_tensors(start: Start, tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(_FAKE)
    process = start("--fake", "--", sys.executable, "-W", "ignore", "large.py", "--one", "two")
    output, said = process.communicate()
    assert process.returncode == 7, said
    assert output == "['large.py', '--one', 'two'] False\n"
    assert counts(tmp_path) == {
        "mm/tn/bf16xbf16/fp32/bf16/m32n65536k16384": 2,
        "mm/tn/bf16xbf16/fp32/bf16/m32n16384k65536": 1,
        "mm/tt/bf16xbf16/fp32/bf16/m32n65536k16384": 1,
        "mm/nt/bf16xbf16/fp32/bf16/m16384n65536k32": 1,
        "mm/nt/bf16xbf16/fp32/bf16/m65536n16384k32": 2,
        "mm/tn/bf16xbf16/fp32/bf16/m16n32k64": 1,
        "bmm/tn/fp16xfp16/fp32/fp16/b2m16n32k64": 1,
    }
    assert Recorder(tmp_path / "out.yaml").read().targets == {"sm_100f"}
    assert "9 GEMMs recorded, 7 distinct, 7 new in the file" in said


@pytest.mark.slow
def test_a_recording_under_fake_tensors_names_platform_and_cuda(
    start: Start, tmp_path: Path
) -> None:
    called = "import torch; a = torch.zeros(16, 64, dtype=torch.half, device='cuda'); a @ a.mT"
    for wanted in ("sm_90a-linux_aarch64-cu12", "sm_90a-linux_x86_64-cu13"):
        process = start("--fake", "--target", wanted, "--", sys.executable, "-c", called)
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert Recorder(tmp_path / "out.yaml").read().targets == {
        "{arch: sm_90a, platform: linux_aarch64, cuda: cu12}",
        "sm_90a",
    }


_LONG = """
import time, torch
a = torch.ones(16, 64, dtype=torch.float16, device="cuda")
for turn in range(3):
    a @ a.t()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "calls"), [(signal.SIGTERM, 143, 3), (signal.SIGKILL, 137, 1)]
)
def test_under_fake_tensors_an_end_from_outside_loses_no_gemm(
    tmp_path: Path, number: signal.Signals, status: int, calls: int
) -> None:
    """A killed program loses how often at most, and only what came after the last write."""
    environment = {**os.environ, "NVGEMM_AOT_RECORD": str(tmp_path / "out.yaml")}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "nvgemm_aot.workload.fake_run", "-c", _LONG],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate()
    assert process.returncode in (status, -number)
    (found,) = counts(tmp_path).items()
    assert found[0] == "mm/tn/fp16xfp16/fp32/fp16/m16n16k64"
    assert calls <= found[1] <= 3


@pytest.mark.slow
def test_under_fake_tensors_a_look_at_numbers_is_explained_and_what_was_met_is_kept(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "looking.py").write_text(
        "import sys, torch\n"
        "print(sys.argv[1:], __name__)\n"
        "a = torch.ones(64, 64).half()\n"
        "print((a @ a).sum().item())\n"
    )
    process = start("--fake", "--", sys.executable, "-W", "ignore", "-m", "looking", "-m", "two")
    output, said = process.communicate()
    assert output == "['-m', 'two'] __main__\n"
    assert process.returncode == 1
    assert "nvgemm-aot: the program read tensor values, and fake tensors have none" in said
    assert counts(tmp_path) == {"mm/tt/fp16xfp16/fp32/fp16/m64n64k64": 1}


@pytest.mark.slow
def test_under_fake_tensors_a_program_that_is_not_there_is_named(start: Start) -> None:
    process = start("--fake", "--", sys.executable, "-W", "ignore", "missing.py")
    output, said = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert "nvgemm-aot: no such program: missing.py" in said
    assert "Traceback" not in said


def test_nothing_starts_where_nothing_could_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("version: 1\n")

    def refused(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["record", *arguments, "--", "touch", "started"])
        assert done.exit_code == RecordError.exit_code == 17
        assert not (tmp_path / "started").exists()
        return done.stderr

    assert "missing/out.yaml: cannot record GEMMs there" in refused("-o", "missing/out.yaml")
    assert "mine.yaml: not a recording" in refused("-o", "mine.yaml")
    assert "--fake runs only Python programs: the command is 'touch started'" in refused("--fake")
    monkeypatch.setenv("NVGEMM_AOT_RECORD_TARGET", "sm_80")
    assert "sm_80: no provider builds for this target" in refused()
    monkeypatch.setenv("NVGEMM_AOT", "off")
    assert "NVGEMM_AOT=off: recording needs it unset" in refused()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["true"], 0, "out.yaml: no GEMM was recorded: torch.compile's Inductor compiled none"),
        (["sh", "-c", "exit 7"], 7, "out.yaml: the command exited with status 7 before compiling"),
        (["sh", "-c", "kill -KILL $$"], 137, "exited with status 137 before compiling a GEMM"),
        (["sh", "-c", "echo a >out.yaml; exit 5"], 5, "error: "),
        (["sh", "-c", "echo a >out.yaml"], RecordError.exit_code, "not a recording, or an"),
        (["./missing"], 2, "cannot run ./missing: No such file"),
    ],
)
def test_the_exit_status_is_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], status: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["record", "-o", "out.yaml", "--", *command])
    assert done.exit_code == status
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "options", "program"),
    [
        (["python", "a.py", "-m", "b"], [], ["a.py", "-m", "b"]),
        (
            ["/usr/bin/python3.11", "-u", "-W", "ignore", "-m", "b"],
            ["-u", "-W", "ignore"],
            ["-m", "b"],
        ),
        (["python3", "-X", "dev", "-c", "pass", "x"], ["-X", "dev"], ["-c", "pass", "x"]),
    ],
)
def test_pythons_own_options_stay_its_own(
    command: list[str], options: list[str], program: list[str]
) -> None:
    assert _with_fake_tensors(command) == [
        command[0], *options, "-m", "nvgemm_aot.workload.fake_run", *program
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command", [["python"], ["python", "-u"], ["bash", "a.py"], ["python", "-m"], ["python", "-c"]]
)
def test_what_is_no_python_program_is_refused(command: list[str]) -> None:
    with pytest.raises(RecordError, match=f"the command is '{' '.join(command)}'"):
        _with_fake_tensors(command)
