from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import header_without_offsets
from nvgemm_aot.cli.build.measured_rankings import rankings_document, rankings_text
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.device import NO_CUDA, TorchVersions
from nvgemm_runtime.settings import REPEATED_VARIABLE
from synthetic_content import SIGNATURE, synthetic_content

SAME = TorchVersions(torch="2.11.1+cu130", cuda="13.0")
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
CONFIRMED: dict[str, Any] = {"confirmed_by": ("a" * 64, "b" * 64)}
REPEATED: dict[str, Any] = {"repeated": 120}
ONCE: dict[str, Any] = {}


def header(*measured: tuple[str, int, dict[str, Any]]) -> Header:
    """Of problems measured on a product, each with one kernel's time, and 1000 ns of ATen's."""
    content: BundleContent = synthetic_content(kernels=1, problems=1)
    kernel = replace(content.kernels[0], signature=SIGNATURE, is_deterministic=True)
    conditions = Conditions(driver="580.95.05", torch="2.11.0", cuda="13.0", date="2026-11-21")
    rankings = tuple(
        ProblemRanking(
            problem=Problem(signature=SIGNATURE, m=m, n=4096, k=4096),
            source=RankingSource(kind="measurement", by="a test", gpu=gpu, conditions=conditions),
            kernels=((kernel.id, time_ns),),
            measured=Measured(
                spreads_ns=(1,),
                aten=Timing(time_ns=1000, spread_ns=1),
                triton=None,
                doubts=(),
                **how,
            ),
            is_further=gpu != H200,
        )
        for m, (gpu, time_ns, how) in enumerate(measured, start=1)
    )
    return header_without_offsets(replace(content, kernels=(kernel,), rankings=rankings))


def found(
    *headers: Header, gpus: tuple[str, ...] = (), versions: TorchVersions | None = SAME
) -> dict[str, dict[str, Any]]:
    documents = rankings_document(headers, gpus, versions)
    return {one["gpu"]: {k: v for k, v in one.items() if k != "gpu"} for one in documents}


SOME = header(
    (H200, 970, CONFIRMED), (H200, 900, REPEATED), (H200, 970, REPEATED), (H200, 500, ONCE)
)
OLD = {"torch 2.11, CUDA 13.0": 4}


def test_what_default_mode_uses_is_counted_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"measured": 4, "used": 2, "used_with_setting": 3, "measured_with": {}}
    assert found(SOME) == {H200: expected}
    monkeypatch.setenv(REPEATED_VARIABLE, "1")
    assert found(SOME) == {H200: {**expected, "used": 3}}


@pytest.mark.parametrize(
    ("versions", "used", "others"),
    [
        (replace(SAME, torch="2.13.0+cu130"), 0, OLD),
        (replace(SAME, cuda="13.2"), 0, OLD),
        (TorchVersions(torch="2.11.0+cpu", cuda=NO_CUDA), 2, {}),
        (TorchVersions(torch="2.13.0+cpu", cuda=NO_CUDA), 0, OLD),
        (None, 2, {}),
    ],
)
def test_rankings_count_beside_the_torch_that_they_were_measured_with(
    versions: TorchVersions | None, used: int, others: dict[str, int]
) -> None:
    one = found(SOME, versions=versions)[H200]
    assert (one["used"], one["measured_with"]) == (used, others)


def test_products_are_counted_apart_and_those_of_this_machine_alone() -> None:
    both = header((H200, 970, CONFIRMED), (H100, 900, REPEATED), (H100, 970, REPEATED))
    assert {gpu: one["used"] for gpu, one in found(both).items()} == {H100: 1, H200: 1}
    assert found(both, gpus=(H100,)).keys() == {H100}
    assert found(both, gpus=("NVIDIA B200",)) == {}
    assert found(both, SOME)[H200]["measured"] == 5


def test_text_says_what_is_used_and_what_a_setting_adds() -> None:
    document: dict[str, Any] = {
        "measured": 4, "used": 2, "used_with_setting": 3, "measured_with": {}
    }  # fmt: skip
    used = "plain torch.compile uses kernels for 2 of 4 problems measured with this torch"
    assert rankings_text(document, "2.11.0") == f"{used} (3 with {REPEATED_VARIABLE}=1)"
    assert rankings_text({**document, "used_with_setting": 2}, "2.11.0") == used


def test_text_names_both_torches_and_what_to_do() -> None:
    document = {"measured": 0, "used": 0, "used_with_setting": 0, "measured_with": OLD}
    assert rankings_text(document, "2.13.0") == (
        "4 problems with torch 2.11, CUDA 13.0, used with the installed torch 2.13.0 under "
        "max-autotune only; install that torch, or on this GPU, run: nvgemm-aot confirm"
    )
    assert rankings_text(document, "2.13.0", is_confirmed=True) == (
        "4 problems with torch 2.11, CUDA 13.0, used with the installed torch 2.13.0 under "
        "max-autotune, and otherwise where confirmed rankings count"
    )
