"""Recording on a GPU: with other backends beside ATen, and for the GPU at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvgemm_runtime.matching.device import device_facts
from nvgemm_runtime.recording.recorder import Recorder, recorded_target
from nvgemm_runtime.recording.text import Recording, target_entry

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


_EXPERTS = """
import sys, torch
from nvgemm_runtime.moe import experts

def leaf(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

x, w1, w3, w2 = leaf(480, 256), leaf(4, 384, 256), leaf(4, 384, 256), leaf(4, 256, 384)
ends = torch.tensor([100, 100, 400, 480], device="cuda")
step = torch.compile(
    lambda x, w1, w3, w2: experts(x, (w1, w3), w2, ends), fullgraph=True, mode=sys.argv[1] or None
)
out = step(x, w1, w3, w2)
out.backward(torch.ones_like(out))
"""


def record(directory: Path, program: str, mode: str) -> Recording:
    """What a program records, for the GPU at hand and nothing else."""
    environment = {
        **os.environ,
        "NVGEMM_AOT_RECORD": str(directory / "out.yaml"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "caches"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, mode],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    recording = Recorder(directory / "out.yaml").read()
    assert not recording.undeclarable
    facts = device_facts("cuda", 0)
    target = recorded_target(facts.capability, facts.platform, facts.cuda)
    assert recording.targets == {target_entry(target)}
    return recording


@pytest.mark.parametrize("mode", ["", "max-autotune-no-cudagraphs"])
def test_the_gemms_of_a_program(tmp_path: Path, mode: str) -> None:
    recording = record(tmp_path, _PROGRAM, mode)
    assert {problem.key: count for problem, count in recording.problems.items()} == {
        "mm/tn/bf16xbf16/fp32/bf16/m32n512k8192": 1,
        "mm/tn/bf16xbf16/fp32/bf16/bias/m32n512k8192": 1,
        "mm/nt/bf16xbf16/fp32/bf16/m512n8192k32": 1,
        "bmm/tn/bf16xbf16/fp32/bf16/b4m64n64k256": 1,
    }


@pytest.mark.parametrize("mode", ["", "max-autotune-no-cudagraphs"])
def test_the_products_of_a_training_step_of_experts(tmp_path: Path, mode: str) -> None:
    recording = record(tmp_path, _EXPERTS, mode)
    product = "bf16xbf16/fp32/bf16"
    assert {problem.key: count for problem, count in recording.problems.items()} == {
        f"grouped_mm/tn/{product}/g4m480n384k256": 2,
        f"grouped_mm/tn/{product}/g4m480n256k384": 1,
        f"grouped_mm/tt/{product}/g4m480n256k384": 2,
        f"grouped_mm/tt/{product}/g4m480n384k256": 1,
        f"k_grouped_mm/nt/{product}/g4m384n256k480": 2,
        f"k_grouped_mm/nt/{product}/g4m256n384k480": 1,
    }
