"""Inductor's autotuning settings with ATen alone: kernels may join, and compiling goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config

import nvgemm_runtime
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle

pytestmark = pytest.mark.usefixtures("counted_anew")

Tensor = torch.Tensor

SETTINGS: dict[str, tuple[Any, ...]] = {
    "pipeline_max_autotune_gemm": (True,),
    "autotune_in_subproc": (True,),
    "max_autotune": (True,),
    "autotune_multi_device": (True,),
    "autotune_fallback_to_aten": (True,),
    "autotune_local_cache": (False,),
    "autotune_num_choices_displayed": (0, None),
    "benchmark_epilogue_fusion": (True, False),
    "benchmark_fusion": (True,),
    "benchmark_harness": (False,),
    "benchmark_kernel": (True,),
    "coordinate_descent_tuning": (True,),
    "deterministic": (True,),
    "force_disable_caches": (True,),
    "incremental_autotune": (True,),
    "max_autotune_allow_flexible_layouts": (True,),
    "max_autotune_gemm_search_space": ("EXHAUSTIVE",),
    "max_autotune_pointwise": (True,),
    "max_autotune_prune_choices_based_on_shared_mem": (False,),
    "max_autotune_report_choices_stats": (True, False),
    "multi_kernel_hints": ([64],),
    "precompilation_timeout_seconds": (0,),
    "prologue_fusion": (True, False),
    "search_autotune_cache": (True,),
    "test_configs.autotune_choice_name_regex": ("mm",),
    "test_configs.force_extern_kernel_in_multi_template": (True,),
}
"""Settings that Inductor looks at when it times choices, with values other than its defaults."""

QUICK = {"pipeline_max_autotune_gemm", "autotune_in_subproc", "deterministic"}

CASES = [
    pytest.param(name, value, marks=() if name in QUICK else pytest.mark.slow)
    for name, values in SETTINGS.items()
    for value in values
    if name in config.get_config_copy()
]


def model(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b)


@pytest.mark.parametrize(("name", "value"), CASES)
def test_compiling_goes_on_as_without_bundles(
    inductor: InductorSession,
    recording_bundle: BuiltBundle,
    operands: tuple[Tensor, Tensor],
    name: str,
    value: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inductor.use()
    with config.patch({name: value}):
        stock = inductor.compile(model, *operands)
        torch._dynamo.reset()
        inductor.use(recording_bundle.path)
        compiled = inductor.compile(model, *operands)
    torch.testing.assert_close(compiled.result, stock.result)
    assert nvgemm_runtime.stats().met == 2
    assert warnings_of(caplog) == []


def test_a_pipeline_that_cannot_compare_several_choices_is_the_reason(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.slow_down_aten()
    with config.patch(pipeline_max_autotune_gemm=True):
        compiled = inductor.compile(torch.mm, *operands)
    assert compiled.launched == ()
    (reason,) = nvgemm_runtime.stats().misses
    assert reason == "pipeline_max_autotune_gemm cannot compare kernels with ATen's only choice"
