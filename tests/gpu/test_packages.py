"""AOTInductor's packages with bundled kernels: made once, loaded with and without nvgemm-aot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from installed import installed_kernels

PROGRAM = Path(__file__).parent / "package_program.py"


def run(action: str, package: Path, **variables: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, **variables}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(package.parent / "caches"))
    done = subprocess.run(
        [sys.executable, PROGRAM, action, package],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {kernel.signature.key for _, kernel in installed_kernels()}
    for key in ("mm/tn/bf16xbf16/fp32/bf16", "bmm/tn/bf16xbf16/fp32/bf16"):
        if key not in keys:
            pytest.skip(f"no installed kernel for {key}; install the quickstart wheel")
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    run("make", path)
    return path


def test_a_package_runs_bundled_kernels(package: Path) -> None:
    result, _ = run("run", package)
    assert result == {"exact": [True, True, True], "aten_gemms": 0}


def test_a_package_runs_on_aten_without_nvgemm_aot(package: Path) -> None:
    result, said = run("run", package, NVGEMM_AOT="off")
    assert result == {"exact": [True, True, True], "aten_gemms": 6}
    assert "nvgemm" not in said


def test_cpp_wrapper_runs_bundled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Path
) -> None:
    """Cold and warm, the second time from torch's cache in the same directory."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from package_program import Projections, operands, slow_down_aten, _is_of_cublas\n"
        "slow_down_aten('cuda')\n"
        "options = {'max_autotune_gemm': True, 'max_autotune_gemm_backends': 'ATEN',\n"
        "           'cpp_wrapper': True}\n"
        "model, arguments = Projections(), operands(64)\n"
        "compiled = torch.compile(model, options=options)\n"
        "with torch.no_grad():\n"
        "    compiled(*arguments)\n"
        "    kind = torch.profiler.ProfilerActivity.CUDA\n"
        "    with torch.profiler.profile(activities=[kind]) as profile:\n"
        "        got = compiled(*arguments)\n"
        "        torch.cuda.synchronize()\n"
        "    assert all(map(torch.equal, got, model(*arguments)))\n"
        "print('aten', sum(_is_of_cublas(event.key) for event in profile.key_averages()))\n"
        "print('hits', torch._dynamo.utils.counters['inductor']['fxgraph_cache_hit'])\n"
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for hits in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", code, PROGRAM.parent],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.splitlines()[-2:] == ["aten 0", f"hits {hits}"]
