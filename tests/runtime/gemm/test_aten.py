"""Settings that make ATen another than the one that is measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.gemm.aten import settings_key, unusual_setting
from nvgemm_runtime.gemm.problem import DType
from tuning_bench import DictatedTimer, bench, run

MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_fresh_torch_is_set_as_usual() -> None:
    assert [dtype for dtype in DType if unusual_setting(dtype)] == []


@pytest.mark.parametrize(
    ("name", "concerned"),
    [
        ("allow_fp16_accumulation", DType.FP16),
        ("allow_fp16_reduced_precision_reduction", DType.FP16),
        ("allow_bf16_reduced_precision_reduction", DType.BF16),
    ],
)
def test_a_flag_concerns_its_own_type(name: str, concerned: DType) -> None:
    usual = getattr(MATMUL, name)
    setattr(MATMUL, name, not usual)
    try:
        found = {dtype: text for dtype in DType if (text := unusual_setting(dtype))}
    finally:
        setattr(MATMUL, name, usual)
    said = f"torch.backends.cuda.matmul.{name} is {not usual}, usually {usual}"
    assert found == {concerned: said}


def test_tf32_concerns_fp32(tf32: None) -> None:
    assert [dtype for dtype in DType if unusual_setting(dtype)] == [DType.FP32]
    assert unusual_setting(DType.FP32) == (
        "torch.backends.cuda.matmul.fp32_precision is tf32, usually none"
    )


def test_another_library_concerns_all(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(name="Cublaslt")  # a torch for the CPU takes no other
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: library)
    assert {unusual_setting(dtype) for dtype in DType} == {
        "torch.backends.cuda.preferred_blas_library() is Cublaslt, usually Cublas"
    }


@pytest.mark.parametrize("value", ["0", "1"])
def test_addmm_without_cublaslt_is_another(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", value)
    said = {unusual_setting(dtype) for dtype in DType}
    assert said == {None if value == "0" else "DISABLE_ADDMM_CUDA_LT is 1, usually not set"}


def test_a_torch_that_does_not_tell_its_library_is_not_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("not compiled\nwith CUDA")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", refuse)
    said = unusual_setting(DType.BF16)
    assert said is not None
    assert "preferred_blas_library() is unknown (not compiled with CUDA), usually" in said
    monkeypatch.delattr(torch.backends.cuda, "preferred_blas_library")
    assert unusual_setting(DType.BF16) is None, "a torch without the function has one library"


def test_the_key_of_caches_knows_library_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = settings_key()
    with monkeypatch.context() as changed:
        changed.setenv("DISABLE_ADDMM_CUDA_LT", "1")
        without_lt = settings_key()
    library = SimpleNamespace(name="Cublaslt")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: library)
    assert len({usual, without_lt, settings_key()}) == 3


@pytest.mark.parametrize(
    "name", ["allow_fp16_accumulation", "allow_bf16_reduced_precision_reduction"]
)
def test_the_key_of_caches_knows_each_flag(name: str) -> None:
    usual, key = getattr(MATMUL, name), settings_key()
    setattr(MATMUL, name, not usual)
    try:
        assert settings_key() != key
    finally:
        setattr(MATMUL, name, usual)
    assert settings_key() == key


def test_tuning_measures_no_other_aten(
    tunable: Path, tuned_path: Path, dictated: DictatedTimer, tf32: None
) -> None:
    with pytest.raises(TuningError, match=r"fp32_precision is tf32, usually none: .* set it back"):
        run(tunable, tuned_path, bench(dictated))
    assert dictated.prepared == []
