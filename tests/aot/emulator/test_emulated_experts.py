"""Experts of a MoE layer on an emulated B200: `nvgemm_runtime.moe`, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emulated_scripts import IMPORTS
from forked_scripts import forked_scripts
from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.pipeline.cache_entries.ptx_store import read_ptx
from nvgemm_aot.pipeline.compiler import compile_all, make_tasks
from nvgemm_aot.providers import Candidate, load_provider
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.ranking_entries import ESTIMATE, RankingSource
from nvgemm_runtime.gemm.problem import Problem, Signature

BF16 = "bf16xbf16/fp32/bf16"
UP, DOWN = f"grouped_mm/tn/{BF16}/swiglu_halves_kept", f"grouped_mm/tn/{BF16}"
FORWARD_ALONE = f"grouped_mm/tn/{BF16}/swiglu_halves"
OF_WEIGHTS = f"k_grouped_mm/nt/{BF16}"
OF_GATES, OF_ROWS = f"grouped_mm/tt/{BF16}/swiglu_halves_gradient", f"grouped_mm/tt/{BF16}"

SCRIPT = """
import collections, os, sys, warnings
from pathlib import Path
bundle = Path(sys.argv[1])
os.environ["NVGEMM_AOT_BUNDLES"] = str(bundle)
from nvgemm_aot.emulator.session import emulated_device
from nvgemm_aot.emulator.session.kept_programs import KeptPrograms
from nvgemm_aot.emulator.session.ptx_runner import PtxRunner
from nvgemm_aot.targets.profile import load_profile
programs = KeptPrograms()
emulated = emulated_device.start(load_profile("B200"), PtxRunner(programs))
import torch, nvgemm_runtime
from nvgemm_runtime.moe import experts
(found,) = nvgemm_runtime.bundles()
keys = {kernel.id: kernel.signature.key for kernel in found.bundle.header.kernels}
for kernel in found.bundle.header.kernels:
    text = bundle.with_name(f"{kernel.id}.ptx").read_text()
    programs.add(found.bundle.payload(kernel), text)
warnings.simplefilter("error")  # that torch computes a product is a warning

COUNTS, DIM, HIDDEN = (5, 0, 12), 64, 72
torch.manual_seed(0)
shapes = (sum(COUNTS), DIM), (len(COUNTS), 2 * HIDDEN, DIM), (len(COUNTS), DIM, HIDDEN)
given = [(torch.randn(shape) * shape[-1] ** -0.5).bfloat16().requires_grad_() for shape in shapes]
out_grad = torch.randn(shapes[0]).bfloat16()

def unfused(x, up, down):
    results = []
    for rows, of_up, of_down in zip(x.split(COUNTS), up, down):
        gates, ups = (rows @ of_up.mT).chunk(2, -1)
        results.append((torch.nn.functional.silu(gates) * ups) @ of_down.mT)
    return torch.cat(results)

wide = [each.detach().double().requires_grad_() for each in given]
expected = unfused(*wide)
wanted = [expected, *torch.autograd.grad(expected, wide, out_grad.double())]

def assert_close(found, wanted):
    assert found.shape == wanted.shape
    error = (found.detach().double() - wanted.detach()).norm() / wanted.detach().norm()
    assert error < 2.0**-8, error  # bf16 has 8 bits, and errors of elements are independent

def launched():
    assert not emulated.failures, emulated.failures
    found = collections.Counter(keys[call.kernel_id] for call in emulated.calls)
    assert not any(each.findings for call in emulated.calls for _, each in call.launches)
    emulated.calls.clear()
    return dict(found)

counts = torch.tensor(COUNTS)
"""


def _smallest(key: str) -> Candidate:
    """Returns the candidate with the least work for a tile, which is emulated soonest."""
    found = load_provider("quack").enumerate(Signature.parse(key), build_target("sm_100f"))
    return min(
        found.candidates,
        key=lambda one: (one.design.tile[0] * one.design.tile[1], one.design.cluster, one.operator),
    )


@pytest.fixture(scope="module")
def bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels for all products of experts, with their PTX beside the bundle."""
    target = build_target("sm_100f")
    wanted = [_smallest(key) for key in (UP, DOWN, FORWARD_ALONE, OF_WEIGHTS, OF_GATES, OF_ROWS)]
    tasks = make_tasks(wanted, target, load_provider("quack"))
    tasks = [replace(task, keeps_ptx=True) for task in tasks]
    compiled = compile_all(tasks, kernel_cache, jobs=1)
    assert not compiled.failures
    directory = tmp_path_factory.mktemp("experts")
    directory.chmod(0o755)
    kernels = []
    for task in tasks:
        payload = compiled.kernels[task.key].payload
        kernels.append(BuiltKernel(**task.candidate.facts(), payload=payload))
        text = read_ptx(task.key, kernel_cache)
        assert text is not None
        (directory / f"{kernels[-1].id}.ptx").write_text(text)
    source = RankingSource(kind=ESTIMATE, by="a test", gpu=target.device.driver_name)
    rankings = [
        ProblemRanking(
            problem=Problem(signature=kernel.signature, m=256, n=256, k=256, groups=3),
            source=source,
            kernels=((kernel.id, None),),
        )
        for kernel in kernels
    ]
    path = directory / "experts.nvgemm"
    content = BundleContent(
        target=target.target,
        device=target.device.name,
        generator="test",
        build_key=sha256_hex(b"build"),
        toolchain={"test": "1"},
        kernels=tuple(kernels),
        rankings=tuple(rankings),
    )
    write_bundle(path, content)
    return path


@pytest.mark.slow
def test_forward_and_backward_are_those_of_unfused_experts(bundle: Path) -> None:
    script = SCRIPT + f"""
out = experts(*given, counts=counts)
assert launched() == {{ {UP!r}: 1, {DOWN!r}: 1 }}
grads = torch.autograd.grad(out, given, out_grad)
assert launched() == {{ {OF_WEIGHTS!r}: 2, {OF_GATES!r}: 1, {OF_ROWS!r}: 1 }}
for each, other in zip([out, *grads], wanted, strict=True):
    assert_close(each, other)
with torch.no_grad():
    alone = experts(*given, counts=counts)
assert launched() == {{ {FORWARD_ALONE!r}: 1, {DOWN!r}: 1 }}
assert_close(alone, wanted[0])
"""  # fmt: skip
    with forked_scripts(IMPORTS) as scripts:
        done = scripts.run(script, str(bundle))
    assert done.returncode == 0, done.stderr
