"""Beside torch's own NVGEMM backend, whose choices are imitated: it needs a GPU nobody had."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inductor_session import InductorSession
from nvgemm_runtime.inductor.autotuning import torch_nvgemm

OPERATORS = {"gemm_128x128", "gemm_64x64"}


class NVUniversalGemmCaller:
    """A choice with what the plug-in reads of that backend's."""

    def __init__(self, operator: str, *, swap_ab: bool = False, bias_node: Any = None) -> None:
        self.kernel = SimpleNamespace(metadata=SimpleNamespace(operator_name=operator))
        self.swap_ab = swap_ab
        self.bias_node = bias_node


def test_the_same_operators_are_left_out_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_KEEP_NVGEMM", raising=False)
    other = NVUniversalGemmCaller("gemm_256x256")
    swapped = NVUniversalGemmCaller("gemm_128x128", swap_ab=True)
    biased = NVUniversalGemmCaller("gemm_64x64", bias_node=object())
    aten = SimpleNamespace(kernel=SimpleNamespace(metadata=None))
    choices = [aten, NVUniversalGemmCaller("gemm_128x128"), other, swapped, biased]
    assert torch_nvgemm.without_doubles(choices, OPERATORS) == [aten, other, swapped, biased]


def test_the_user_may_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_KEEP_NVGEMM", "1")
    choices = [NVUniversalGemmCaller("gemm_128x128")]
    assert torch_nvgemm.without_doubles(choices, OPERATORS) == choices


def test_its_choices_are_known_from_all_others() -> None:
    assert torch_nvgemm.compiles_itself([object(), NVUniversalGemmCaller("gemm_128x128")])
    assert not torch_nvgemm.compiles_itself([object(), SimpleNamespace(kernel=None)])


def test_the_backend_of_this_torch_is_as_it_was_read() -> None:
    """Where torch has it: the class and the fields that the plug-in looks at."""
    spec = importlib.util.find_spec("torch._inductor.codegen")
    assert spec is not None
    (place,) = spec.submodule_search_locations or ()
    source = Path(place, "nv_universal_gemm", "nv_universal_gemm.py")
    if not source.is_file() or "NVUniversalGemmCaller" not in source.read_text():
        pytest.skip(f"torch {torch.__version__} has no such backend")
    (caller,) = (
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "NVUniversalGemmCaller"
    )
    text = ast.unparse(caller)
    if "operator_name" not in text:
        pytest.skip(f"the backend of torch {torch.__version__} is not for cutlass.operators")
    for field in ("self.kernel = kernel", "self.swap_ab = swap_ab", "self.bias_node = bias_node"):
        assert field in text
    assert "kernel.metadata.operator_name" in text


@pytest.mark.slow
def test_its_doubles_leave_the_choices_of_a_covered_gemm(
    inductor: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: one function adds such choices before the plug-in, one sees what it leaves."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    a, b = torch.randn(16, 64), torch.randn(64, 32)
    inductor.slow_down_aten()
    (operator,) = inductor.compile(lambda a, b: (a @ b) + 1, a, b).launched
    seen: list[list[str]] = []

    def add(choices: list[Any]) -> list[Any]:
        return [*choices, *map(NVUniversalGemmCaller, ("other", operator))]

    def watch(choices: list[Any]) -> list[Any]:
        imitated = [choice for choice in choices if isinstance(choice, NVUniversalGemmCaller)]
        seen.append([choice.kernel.metadata.operator_name for choice in imitated])
        return [choice for choice in choices if choice not in imitated]

    cache = get_algorithm_selector_cache()
    monkeypatch.setattr(cache, "preprocessing_fns", [add, *cache.preprocessing_fns, watch])
    torch._dynamo.reset()
    inductor.compile(lambda a, b: (a @ b) + 2, a, b)
    assert seen == [["other"]]
