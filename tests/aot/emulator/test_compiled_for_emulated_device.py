"""torch.compile on an emulated GPU, with rankings and times that a test dictates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from emulated_scripts import IMPORTS, PRELUDE, PROBLEM
from forked_scripts import forked_scripts
from measured_bundles import ATEN, TWO_GPUS
from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.emulator.checking.kernel_check import KernelTask
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.problem import Problem

Run = Callable[..., None]

COMPILE = """
from torch._inductor import config, select_algorithm
from torch._inductor.utils import fresh_cache
def compiled(function, *operands, **options):
    backends = {"max_autotune_gemm_backends": "ATEN", "compile_threads": 1}
    with fresh_cache(), config.patch(backends):
        result = torch.compile(function, dynamic=False, **options)(*operands)
    assert not emulated.failures, emulated.failures
    return result, [call.kernel_id for call in emulated.calls]
"""

INTERPRET = """
from pathlib import Path
from nvgemm_aot.emulator.session.kept_programs import KeptPrograms
from nvgemm_aot.emulator.session.ptx_runner import PtxRunner
programs = KeptPrograms()
emulated._run = PtxRunner(programs)
(found,) = nvgemm_runtime.bundles()
(kernel,) = found.bundle.header.kernels
programs.add(found.bundle.payload(kernel), Path(sys.argv[2]).read_text())
a, b = values(40, 64), values(24, 64).t()
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script on an emulated B200 with a bundle."""
    imports = "import torch._dynamo, torch._inductor.compile_fx, torch._inductor.select_algorithm\n"
    with forked_scripts(IMPORTS + imports) as scripts:

        def run(script: str, bundle: Path, *arguments: Path) -> None:
            script = PRELUDE + PROBLEM + COMPILE + script
            done = scripts.run(script, str(bundle), *map(str, arguments))
            assert done.returncode == 0, done.stderr

        yield run


def write_measured(path: Path, kernel: BuiltKernel, aten_ns: int) -> None:
    """Write a bundle in which a B200 took 200 ns for the kernel, and so long for ATen."""
    target = build_target("sm_100f")
    conditions = Conditions(
        driver="580.95.05", torch=torch.__version__, cuda="13.0", date="2026-11-21"
    )
    ranking = ProblemRanking(
        problem=Problem(signature=kernel.signature, m=40, n=24, k=64),
        source=RankingSource(
            kind="measurement", by="a test", gpu="NVIDIA B200", conditions=conditions
        ),
        kernels=((sha256_hex(kernel.payload), 200),),
        measured=Measured(
            spreads_ns=(1,),
            aten=Timing(time_ns=aten_ns, spread_ns=1),
            triton=None,
            doubts=(),
            confirmed_by=TWO_GPUS,
        ),
    )
    path.parent.mkdir(mode=0o755)
    write_bundle(
        path,
        BundleContent(
            target=target.target,
            device=target.device.name,
            generator="test",
            build_key=sha256_hex(b"build"),
            toolchain={"test": "1"},
            kernels=(kernel,),
            rankings=(ranking,),
        ),
    )


@pytest.mark.parametrize("aten_ns", [900, pytest.param(100, marks=pytest.mark.slow)])
def test_compiled_code_runs_the_ptx_of_a_kernel_that_is_ranked_first(
    run: Run, emulated_kernel: KernelTask, tmp_path: Path, aten_ns: int
) -> None:
    kernel, ptx = emulated_kernel.kernel, tmp_path / "kernel.ptx"
    ptx.write_text(emulated_kernel.ptx)
    bundle = tmp_path / "shared" / "measured.nvgemm"
    write_measured(bundle, kernel, aten_ns)
    run(INTERPRET + f"""
result, launched = compiled(torch.mm, a, b)
assert torch.equal(result.float(), a.float() @ b.float())
assert launched == ([kernel.id] if {aten_ns} == 900 else []), launched
for call in emulated.calls:
    ((launch, execution),) = call.launches
    assert launch.cluster == {(*kernel.design.cluster, 1)}
    assert execution.warp_instructions > 1000
""", bundle, ptx)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fastest", ["0", "1", ATEN])
def test_the_choice_with_the_best_dictated_time_computes(
    run: Run, real_bundles: dict[str, Path], fastest: str
) -> None:
    run(f"""
kernels = [served.kernel.id for served in nvgemm_runtime.explain(a, b).match.kernels]
assert len(kernels) == 2
fastest = {"'mm'" if fastest == ATEN else f"kernels[{fastest}]"}
times = dict.fromkeys((*kernels, "mm"), 2.0) | {{fastest: 1.0}}
select_algorithm.ExternKernelCaller.benchmark = lambda choice, *arguments, out: next(
    ms for name, ms in times.items() if name[:12] in choice.name.split("_")
)
result, launched = compiled(torch.mm, a, b, mode="max-autotune-no-cudagraphs")
torch.testing.assert_close(result, expected)
assert launched == [kernel for kernel in kernels if kernel == fastest], launched
""", real_bundles["sm_100f"])  # fmt: skip
