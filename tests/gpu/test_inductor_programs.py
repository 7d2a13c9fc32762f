"""Programs that import torch alone, compiled with kernel wheels in processes of their own.

Needs the kernels that `test_inductor` needs; ATen is slowed down as there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from generated_code import bundled_calls, modules
from user_program import ERROR_FACTOR

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.installed.discover import find_wheel_bundles

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(
    os.environ.get("NVGEMM_AOT") == "off", reason="NVGEMM_AOT=off keeps the plug-in out"
)


def python_path() -> list[Path]:
    return [Path(one).resolve() for one in os.environ.get("PYTHONPATH", "").split(":") if one]


def run_program(
    directory: Path, *arguments: str, program: str = "user_program.py", **variables: str
) -> tuple[dict[str, Any], str]:
    """A program's report and what it wrote to stderr; ``directory`` holds the caches."""
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, python_path())),
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), "--device", DEVICE, *arguments],
        capture_output=True, text=True, timeout=300, env=environment, cwd=directory.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def assert_right(report: dict[str, Any]) -> None:
    """Every result and gradient of every step is as near to fp32 as eager's."""
    for dtype, steps in report["runs"].items():
        for step in steps:
            for error, usual in zip(step["errors"], step["eager_errors"]):
                assert error <= ERROR_FACTOR * usual + 1e-4, dtype


def test_models_train_under_cuda_graphs(tmp_path: Path, kernels: dict[str, Kernel]) -> None:
    report, _ = run_program(tmp_path / "c", "--slow-aten", "--dtypes", "bfloat16,float16")
    assert_right(report)
    assert report["hooked"]
    assert {step["aten_gemms"] for step in report["runs"]["bfloat16"][1:]} == {0}
    called = {kernels[call].signature.key for call in bundled_calls(tmp_path / "c")}
    assert called >= {
        "mm/tn/bf16xbf16/fp32/bf16",
        "mm/tt/bf16xbf16/fp32/bf16",
        "mm/nt/bf16xbf16/fp32/bf16",
    }
    if any(kernel.signature.key == "mm/tn/fp16xfp16/fp32/fp16" for kernel in kernels.values()):
        assert "mm/tn/fp16xfp16/fp32/fp16" in called


def test_models_train_where_nothing_is_slowed_down(tmp_path: Path) -> None:
    report, stderr = run_program(tmp_path / "c", "--dtypes", "bfloat16,float16")
    assert_right(report)
    assert report["hooked"]
    assert "nvgemm-aot" not in stderr, "nothing to warn of"


def test_off_leaves_torch_alone(tmp_path: Path) -> None:
    report, _ = run_program(tmp_path / "c", "--slow-aten", NVGEMM_AOT="off")
    assert_right(report)
    assert not report["hooked"]
    assert not any("nvgemm" in text for text in modules(tmp_path / "c"))


def test_sharded_models_train(tmp_path: Path) -> None:
    report, _ = run_program(tmp_path / "c", program="sharded_program.py")
    if "missing" in report:
        pytest.skip(f"FSDP2 cannot be had: {report['missing']}")
    for error, usual in zip(report["errors"], report["eager_errors"]):
        assert error <= ERROR_FACTOR * usual + 1e-4
    assert report["repeats"]
    assert bundled_calls(tmp_path / "c")


# Wheels that come and go between processes over one cache.


def without_kernel_wheels(directory: Path) -> str:
    """PYTHONPATH without the kernel wheels: directories of links to what else is there."""
    hidden: dict[Path, set[str]] = {}
    for bundle in find_wheel_bundles():
        wheel = distribution(bundle.distribution)
        names = hidden.setdefault(Path(str(wheel.locate_file(""))).resolve(), set())
        names |= {file.parts[0] for file in wheel.files or ()}
    path = python_path()
    for root in hidden:
        if root not in path:
            pytest.skip(f"kernel wheels are installed in {root}, which is not on PYTHONPATH")
    for number, root in enumerate(path):
        if root in hidden:
            path[number] = directory / str(number)
            path[number].mkdir(parents=True)
            for entry in root.iterdir():
                if entry.name not in hidden[root]:
                    (path[number] / entry.name).symlink_to(entry)
    return ":".join(map(str, path))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, kernels: dict[str, Kernel]) -> Path:
    """The cache of a process in which bundled kernels won all GEMMs."""
    directory = tmp_path_factory.mktemp("cold") / "cache"
    report, _ = run_program(directory, "--slow-aten")
    assert_right(report)
    assert report["misses"] > 0
    assert bundled_calls(directory)
    return directory


def test_a_warm_start_runs_what_was_chosen(cold: Path) -> None:
    report, stderr = run_program(cold)
    assert_right(report)
    assert (report["hits"] > 0, report["misses"]) == (True, 0)
    assert {step["aten_gemms"] for step in report["runs"]["bfloat16"][1:]} == {0}
    assert "nvgemm-aot" not in stderr, "nothing to warn of"


def test_without_the_kernel_wheel_aten_runs(cold: Path, tmp_path: Path) -> None:
    path = without_kernel_wheels(tmp_path)
    report, _ = run_program(cold, PYTHONPATH=path, NVGEMM_AOT_BUNDLES="")
    assert_right(report)
    assert {step["aten_gemms"] for step in report["runs"]["bfloat16"][1:]} != {0}
    back, _ = run_program(cold)
    assert_right(back)
    assert (back["hits"] > 0, back["misses"]) == (True, 0)
    assert {step["aten_gemms"] for step in back["runs"]["bfloat16"][1:]} == {0}
