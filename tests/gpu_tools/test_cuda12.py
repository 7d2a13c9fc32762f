"""The process without torch of tests/gpu/cuda12.py, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cuda12
import pytest

import cpu_provider
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.problem import DType, Op

FACTS = {"library": "/packed/lib.so", "device": "a GPU", "driver": "13.0"}
GOOD = {"kernel": "abc", "problem": "mm", "result": "exact"}


def child(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The process, where torch cannot be imported."""
    (directory / "torch.py").write_text("raise ImportError('there is no torch')\n")
    return subprocess.run(
        [sys.executable, str(cuda12.CHILD), *arguments],
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("operand", [DType.FP32, DType.FP16, DType.BF16])
def test_kernels_are_launched_without_torch_and_compared(
    tmp_path: Path, kernel_cache: Cache, operand: DType
) -> None:
    problems = [
        cpu_provider.problem(layout, op=op, operand=operand)
        for op, layout in ((Op.MM, "tn"), (Op.MM, "nt"), (Op.BMM, "tt"))
    ]
    built = cpu_provider.build_bundle(problems, tmp_path, kernel_cache, candidates=1)
    done = child(tmp_path, str(built.path), "cpu")
    assert done.returncode == 0, done.stderr
    facts, *kernels = map(json.loads, done.stdout.splitlines())
    assert facts == {"library": "none", "device": "cpu", "driver": "none"}
    assert [line["result"] for line in kernels] == ["exact"] * 3


class Wrong(cpu_provider.CpuProvider):
    """Kernels that compute nothing, or raise."""

    name = "test_cuda12:Wrong"
    behaviour = "return 0;"

    def behaviour_of(self, candidate: object) -> str:
        return self.behaviour


class Raising(Wrong):
    name = "test_cuda12:Raising"
    behaviour = 'return raise("RuntimeError", "out of patience");'


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        (Wrong(), "FAILED: 512 of 512 values differ"),
        (Raising(), "FAILED: the launcher returned -1: RuntimeError: out of patience"),
    ],
)
def test_a_wrong_result_and_an_error_are_failures(
    tmp_path: Path,
    kernel_cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    provider: Wrong,
    said: str,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    built = cpu_provider.build_bundle(
        [cpu_provider.problem()], tmp_path, kernel_cache, candidates=1, provider=provider
    )
    done = child(tmp_path, str(built.path), "cpu")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["result"] == said


def test_without_a_driver_the_process_says_so(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    done = child(tmp_path, "nothing.nvgemm", "cuda")
    assert done.returncode == 1
    assert "libcuda.so.1" in done.stderr


@pytest.mark.parametrize(
    ("lines", "code", "result", "said"),
    [
        ([FACTS, GOOD], 0, 0, "| abc | mm | exact |"),
        ([FACTS, GOOD | {"result": "FAILED: 3 of 4 values differ"}], 1, 1, "1 kernels, 1 failed"),
        ([FACTS, GOOD], -11, 1, "the process ended with -11"),
        ([FACTS], 0, 1, "0 kernels"),
        ([], 1, 1, "0 kernels"),
        (
            [FACTS | {"library": "/elsewhere/lib.so"}, GOOD],
            0,
            1,
            "FAILED: /elsewhere/lib.so is not",
        ),
    ],
)
def test_only_exact_kernels_beside_the_packed_library_pass(
    capsys: pytest.CaptureFixture[str],
    lines: list[dict[str, str]],
    code: int,
    result: int,
    said: str,
) -> None:
    assert cuda12.report(lines, Path("/packed"), code) == result
    assert said in capsys.readouterr().out


def test_the_manifest_is_of_cuda_12_for_x86_64() -> None:
    manifest = load_manifest(Path(cuda12.__file__).with_name("cuda12.yaml"))
    assert [target.key for target in manifest.bundle_targets] == ["sm_90a-linux_x86_64-cu12"]
