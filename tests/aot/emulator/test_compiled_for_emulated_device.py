"""torch.compile on an emulated GPU, which picks kernels by times that a test dictates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from emulated_scripts import IMPORTS, PRELUDE, PROBLEM
from forked_scripts import forked_scripts
from measured_bundles import ATEN, write_measured
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op

Run = Callable[[Path, str], None]

COMPILE = """
from torch._inductor import config, select_algorithm
from torch._inductor.utils import fresh_cache
times = {}  # in ms, by kernel id and "mm", which is ATen
select_algorithm.ExternKernelCaller.benchmark = lambda choice, *arguments, out: next(
    ms for name, ms in times.items() if name[:12] in choice.name.split("_")
)
def compiled(function, *operands, **options):
    emulated.calls.clear()
    torch._dynamo.reset()
    backends = {"max_autotune_gemm_backends": "ATEN", "compile_threads": 1}
    with fresh_cache(), config.patch(backends):
        result = torch.compile(function, dynamic=False, **options)(*operands)
    assert not emulated.failures
    return result, [call.kernel_id for call in emulated.calls]
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script on an emulated B200 with a bundle."""
    imports = "import torch._dynamo, torch._inductor.compile_fx, torch._inductor.select_algorithm\n"
    with forked_scripts(IMPORTS + imports) as scripts:

        def run(bundle: Path, script: str) -> None:
            done = scripts.run(PRELUDE + PROBLEM + COMPILE + script, str(bundle))
            assert done.returncode == 0, done.stderr

        yield run


@pytest.mark.slow
@pytest.mark.parametrize("fastest", ["0", "1", ATEN])
def test_the_choice_with_the_best_dictated_time_computes(
    run: Run, real_bundles: dict[str, Path], fastest: str
) -> None:
    run(real_bundles["sm_100f"], f"""
kernels = [served.kernel.id for served in nvgemm_runtime.explain(a, b).match.kernels]
assert len(kernels) == 2
fastest = {"'mm'" if fastest == ATEN else f"kernels[{fastest}]"}
times = dict.fromkeys((*kernels, "mm"), 2.0) | {{fastest: 1.0}}
result, launched = compiled(torch.mm, a, b, mode="max-autotune-no-cudagraphs")
torch.testing.assert_close(result, expected)
assert launched == [kernel for kernel in kernels if kernel == fastest], launched
""")  # fmt: skip


def test_rankings_measured_on_the_emulated_product_decide_without_autotuning(
    run: Run, real_bundles: dict[str, Path], tmp_path: Path
) -> None:
    with Bundle(real_bundles["sm_100f"]) as bundle:
        operators = [
            kernel.operator for kernel in bundle.header.kernels if kernel.signature.op is Op.MM
        ]
    for number, aten in enumerate((900, 100)):
        times = {operator: 200 + place for place, operator in enumerate(operators)}
        measured = write_measured(
            real_bundles["sm_100f"],
            tmp_path / f"{number}" / "measured.nvgemm",
            {8: {**times, ATEN: aten}},
            gpu="NVIDIA B200",
            torch=torch.__version__,
            cuda="13.0",
        )
        run(measured, f"""
m, n, k = 8, 4096, 4096
a_shape, b_shape = (m, k), (n, k)
a, b = values(m, k), values(n, k).t()
best = next(
    kernel.id for found in nvgemm_runtime.bundles() for kernel in found.bundle.header.kernels
    if kernel.operator == {operators[0]!r}
)
result, launched = compiled(torch.mm, a, b)
torch.testing.assert_close(result.float(), a.float() @ b.float(), rtol=0.01, atol=0.1)
assert launched == ([best] if {aten} == 900 else []), launched
""")  # fmt: skip
