"""Inductor's autotuning settings with ATen alone: kernels may join, and compiling goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config

import nvgemm_runtime
from inductor_session import InductorSession, warnings_of

pytestmark = pytest.mark.usefixtures("counted_anew")

Tensor = torch.Tensor

TOGETHER: tuple[dict[str, Any], ...] = (
    {
        "autotune_local_cache": False,
        "autotune_num_choices_displayed": 0,
        "benchmark_epilogue_fusion": True,
        "benchmark_fusion": True,
        "benchmark_harness": False,
        "benchmark_kernel": True,
        "max_autotune_report_choices_stats": True,
        "precompilation_timeout_seconds": 0,
        "prologue_fusion": True,
    },
    {
        "autotune_fallback_to_aten": True,
        "autotune_multi_device": True,
        "autotune_num_choices_displayed": None,
        "benchmark_epilogue_fusion": False,
        "coordinate_descent_tuning": True,
        "max_autotune": True,
        "max_autotune_gemm_search_space": "EXHAUSTIVE",
        "max_autotune_pointwise": True,
        "max_autotune_prune_choices_based_on_shared_mem": False,
        "max_autotune_report_choices_stats": False,
        "prologue_fusion": False,
    },
    {
        "force_disable_caches": True,
        "incremental_autotune": True,
        "max_autotune_allow_flexible_layouts": True,
        "multi_kernel_hints": [64],
        "search_autotune_cache": True,
    },
    {"test_configs.autotune_choice_name_regex": "mm"},
    {"test_configs.force_extern_kernel_in_multi_template": True},
)
"""Settings that Inductor looks at when it times choices, with values other than its defaults."""

CASES = [
    *(
        {name: True}
        for name in ("pipeline_max_autotune_gemm", "autotune_in_subproc", "deterministic")
    ),
    *(pytest.param(one, marks=pytest.mark.slow) for one in TOGETHER),
]


def model(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b)


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: next(iter(settings)))
def test_compiling_goes_on(
    inductor: InductorSession,
    operands: tuple[Tensor, Tensor],
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = config.get_config_copy()
    with config.patch({name: value for name, value in settings.items() if name in known}):
        compiled = inductor.compile(model, *operands)
    torch.testing.assert_close(compiled.result, model(*operands))
    assert nvgemm_runtime.stats().met == 1
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
