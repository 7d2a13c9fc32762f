"""Recording on a GPU: with other backends beside ATen, and for the GPU at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvgemm_runtime.recording.recorder import Recorder, chosen_target

_PROGRAM = """
import sys, torch
mode, dtype = sys.argv[1] or None, torch.bfloat16
weight = torch.randn(512, 8192, device="cuda", dtype=dtype, requires_grad=True)
x = torch.randn(32, 8192, device="cuda", dtype=dtype)
c = torch.randn(4, 64, 256, device="cuda", dtype=dtype)
bias, other = torch.randn(512, device="cuda", dtype=dtype), weight.detach().clone()
result, *_ = torch.compile(
    lambda x, c: (x @ weight.t(), torch.bmm(c, c.mT), torch.addmm(bias, x, other.t())),
    mode=mode,
)(x, c)
result.backward(torch.randn_like(result))
"""
"""Its k is so long that Inductor may split it, which makes products of its own."""


@pytest.mark.parametrize("mode", ["", "max-autotune-no-cudagraphs"])
def test_the_gemms_of_a_program(tmp_path: Path, mode: str) -> None:
    environment = {
        **os.environ,
        "NVGEMM_AOT_RECORD": str(tmp_path / "out.yaml"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, mode],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    recording = Recorder(tmp_path / "out.yaml").read()
    target = chosen_target(torch.cuda.get_device_capability())
    assert {problem.key: count for problem, count in recording.problems.items()} == {
        "mm/tn/bf16xbf16/fp32/bf16/m32n512k8192": 1,
        "mm/tn/bf16xbf16/fp32/bf16/bias/m32n512k8192": 1,
        "mm/nt/bf16xbf16/fp32/bf16/m512n8192k32": 1,
        "bmm/tn/bf16xbf16/fp32/bf16/b4m64n64k256": 1,
    }
    assert not recording.others
    assert recording.targets == {target}
