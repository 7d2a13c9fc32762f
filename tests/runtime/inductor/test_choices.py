"""Bundled kernels among Inductor's choices: when they join, when they win, what is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.select_algorithm import add_preprocessing_fn, get_algorithm_selector_cache

import cpu_provider
import recording_kernels
from inductor_session import HEADER, InductorSession
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.inductor import hook, reading

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def sleeping_bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Kernels that lose against ATen: three for one problem."""
    return recording_kernels.build_recording(
        [cpu_provider.problem()],
        tmp_path_factory.mktemp("sleeping"),
        kernel_cache,
        recording_kernels.Sleeping(),
        candidates=3,
    )


def test_a_kernel_that_is_fastest_wins_and_computes(
    inductor: InductorSession, recording_bundle: BuiltBundle, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.slow_down_aten()
    a, b = operands
    transposed = b.t().contiguous().t()

    def model(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return a @ b, a @ c, a[:8] @ b

    compiled = inductor.compile(model, a, b, transposed)
    torch.testing.assert_close(compiled.result, model(a, b, transposed))
    assert len(compiled.launched) == 3
    (code,) = compiled.code
    kernels = {kernel.signature.key: kernel for kernel in recording_bundle.header.kernels}
    for layout in ("tt", "tn"):
        kernel_id = kernels[f"mm/{layout}/fp32xfp32/fp32/fp32"].id
        assert code.count(f"'{kernel_id}'") == 1, "one declaration a kernel"
    assert code.count(HEADER) == 1
    assert code.count("NVGEMM_AOT_BUNDLES") == 2, "the origin, for the warning"
    assert "extern_kernels.mm(" not in code


def test_kernels_that_are_slower_lose_without_a_trace(
    inductor: InductorSession, sleeping_bundle: BuiltBundle, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.use(sleeping_bundle.path)
    compiled = inductor.compile(torch.mm, *operands)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert compiled.launched == ()
    assert "extern_kernels.mm(" in compiled.code[0]
    assert "nvgemm" not in compiled.code[0]


@pytest.mark.slow
def test_kernels_with_a_workspace_win_and_get_it_at_each_launch(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    operands: tuple[Tensor, Tensor],
) -> None:
    bundle = recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path, kernel_cache, recording_kernels.WithCounters()
    )
    inductor.use(bundle.path)
    inductor.slow_down_aten()
    for cpp_wrapper in (False, True):
        with config.patch(cpp_wrapper=cpp_wrapper):
            compiled = inductor.compile(lambda a, b: a @ b + a[:, :1] @ b[:1], *operands)
            torch.testing.assert_close(
                compiled.result, operands[0] @ operands[1] + operands[0][:, :1] @ operands[1][:1]
            )
            assert len(compiled.launched) >= 1


@pytest.mark.parametrize("setting", ["torch", "inductor"])
def test_kernels_that_depend_on_timing_do_not_join_deterministic_programs(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    operands: tuple[Tensor, Tensor],
    setting: str,
) -> None:
    bundle = recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path, kernel_cache, recording_kernels.TimingDependent()
    )
    inductor.use(bundle.path)
    inductor.slow_down_aten()
    assert inductor.compile(torch.mm, *operands).launched
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(setting == "torch")
    try:
        with inductor.watch_choices() as choices, config.patch(deterministic=setting != "torch"):
            compiled = inductor.compile(torch.mm, *operands)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert compiled.launched == ()
    assert not any("nvgemm" in name for names in choices for name in names)


@pytest.fixture(scope="module")
def wide_bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Three kernels for one problem; the one with the smallest tile takes any alignment."""
    return recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path_factory.mktemp("wide"), kernel_cache, candidates=3
    )


def test_nothing_joins_without_max_autotune(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.slow_down_aten()
    with config.patch(max_autotune_gemm=False), inductor.watch_choices() as seen:
        inductor.record.forget()
        compiled = inductor.compile(torch.mm, *operands)
    assert not any(name.startswith("nvgemm") for names in seen for name in names)
    assert "nvgemm" not in compiled.code[0]
    assert compiled.launched == ()


def test_the_mode_and_the_backends_of_torch_decide_nothing_else(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.slow_down_aten()
    usual = {"max_autotune_gemm": False, "max_autotune_gemm_backends": "ATEN,TRITON"}
    with config.patch(usual):
        compiled = inductor.compile(torch.mm, *operands, mode="max-autotune")
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert len(compiled.launched) == 1


@pytest.mark.parametrize(
    ("setting", "joined", "warnings"),
    [("0", 0, 0), ("2", 2, 0), ("", 3, 0), ("many", 3, 1), ("-1", 3, 1)],
)
def test_as_many_kernels_join_as_are_allowed(
    inductor: InductorSession,
    wide_bundle: BuiltBundle,
    operands: tuple[Tensor, Tensor],
    caplog: pytest.LogCaptureFixture,
    setting: str,
    joined: int,
    warnings: int,
) -> None:
    inductor.use(wide_bundle.path)
    inductor.monkeypatch.setenv("NVGEMM_AOT_MAX_CHOICES", setting)
    with inductor.watch_choices() as seen:
        compiled = inductor.compile(torch.mm, *operands)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    (names,) = seen
    ranked = [wide_bundle.header.kernels[place.kernel].id for place in best_first(wide_bundle)]
    assert names == ["mm", *(f"nvgemm_mm_{kernel_id[:12]}" for kernel_id in ranked[:joined])]
    said = [r.getMessage() for r in caplog.records if "NVGEMM_AOT_MAX_CHOICES" in r.getMessage()]
    assert len(said) == warnings
    assert all(f"NVGEMM_AOT_MAX_CHOICES={setting}: must be" in message for message in said)


def best_first(bundle: BuiltBundle) -> Any:
    (ranking,) = bundle.header.rankings
    return ranking.kernels


def test_a_users_own_preprocessing_function_can_refuse_ours(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    def refuse(choices: list[Any]) -> list[Any]:
        return [choice for choice in choices if not choice.name.startswith("nvgemm")]

    inductor.slow_down_aten()
    add_preprocessing_fn(refuse)
    try:
        compiled = inductor.compile(torch.mm, *operands)
    finally:
        get_algorithm_selector_cache().preprocessing_fns.remove(refuse)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]


def test_a_users_own_class_of_choices_changes_nothing(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class OwnChoices(InductorChoices):
        pass

    inductor.slow_down_aten()
    with V.set_choices_handler(OwnChoices()):
        compiled = inductor.compile(torch.mm, *operands, fullgraph=True)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert len(compiled.launched) == 1


def test_kernels_are_timed_where_autotuning_has_processes_of_its_own(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    inductor.slow_down_aten()
    with config.patch(autotune_in_subproc=True):
        compiled = inductor.compile(torch.mm, *operands)
    torch.testing.assert_close(compiled.result, torch.mm(*operands))
    assert len(compiled.launched) == 1


def test_the_kernel_that_takes_any_alignment_joins_for_an_unaligned_view(
    inductor: InductorSession, wide_bundle: BuiltBundle
) -> None:
    inductor.use(wide_bundle.path)
    inductor.slow_down_aten()
    flat, b = torch.randn(16 * 64 + 1), torch.randn(64, 32)

    def model(flat: Tensor, b: Tensor) -> Tensor:
        return flat[1:].view(16, 64) @ b

    compiled = inductor.compile(model, flat, b)
    torch.testing.assert_close(compiled.result, model(flat, b))
    assert compiled.launched == ("Cpu_1x1",)


def test_distributed_autotuning_is_left_alone(
    inductor: InductorSession, operands: tuple[Tensor, Tensor]
) -> None:
    """It passes choices between processes, and knows ATen's. Only the plug-in sees it on here."""

    def switch(on: bool) -> Callable[[list[Any]], list[Any]]:
        def set_it(choices: list[Any]) -> list[Any]:
            config.distributed_max_autotune_gemm = on
            return choices

        return set_it

    functions = get_algorithm_selector_cache().preprocessing_fns
    inductor.monkeypatch.setattr(
        get_algorithm_selector_cache(),
        "preprocessing_fns",
        [switch(True), functions[0], switch(False), *functions[1:]],
    )
    inductor.slow_down_aten()
    compiled = inductor.compile(torch.mm, *operands)
    assert compiled.launched == ()


@pytest.mark.parametrize(
    ("gemm_of", "named", "reason"),
    [
        (lambda a, b: torch.addmm(b[0], a, b, alpha=2), "addmm", "alpha is 2, must be 1"),
        (lambda a, b: a.double() @ b.double(), "mm of", "takes torch.float64"),
    ],
    ids=["alpha", "dtype"],
)
def test_a_gemm_that_is_not_served_is_reported_with_the_reason(
    inductor: InductorSession,
    operands: tuple[Tensor, Tensor],
    met: Callable[[], list[dict[str, Any]]],
    gemm_of: Callable[..., Tensor],
    named: str,
    reason: str,
) -> None:
    compiled = inductor.compile(gemm_of, *operands)
    torch.testing.assert_close(compiled.result, gemm_of(*operands))
    (event,) = met()
    assert event["basis"] == "miss"
    assert named in event["gemm"]
    assert reason in " ".join(event["reasons"])


def test_a_gemm_without_an_aten_choice_is_reported(
    inductor: InductorSession,
    operands: tuple[Tensor, Tensor],
    met: Callable[[], list[dict[str, Any]]],
) -> None:
    inductor.monkeypatch.setattr(
        hook, "find_gemm", lambda choices: replace(reading.find_gemm(choices), is_served=False)
    )
    assert inductor.compile(torch.mm, *operands).launched == ()
    (event,) = met()
    assert event["gemm"].startswith("mm into")
    assert "max_autotune_gemm_backends lacks ATEN" in event["reasons"][0]
