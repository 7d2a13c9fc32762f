"""What generated code calls: by the kernel where it is there and can, by ATen in any other case."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cpu_provider
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.inductor import compiled as old_name
from nvgemm_runtime.launch import compiled
from nvgemm_runtime.launch.loading import native
from synthetic_bundles import write_synthetic_bundle

Tensor = torch.Tensor

WHEEL = "nvgemm-kernels-model 1.0"


@pytest.fixture
def kernel_id(recording_bundle: BuiltBundle) -> str:
    """A kernel for row-major fp32 matrices, aligned to 16 bytes."""
    return next(
        kernel.id
        for kernel in recording_bundle.header.kernels
        if kernel.signature.key == "mm/tt/fp32xfp32/fp32/fp32"
    )


def assert_computes(gemm: compiled.Gemm, a: Tensor, b: Tensor) -> None:
    out = torch.full((a.shape[0], b.shape[1]), float("nan"))
    assert gemm(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)


def test_calls_the_kernel_and_says_nothing(
    inductor: InductorSession, kernel_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    assert inductor.record.lines() == []
    for m in (16, 7, 33):
        assert_computes(gemm, torch.randn(m, 64), torch.randn(64, 32))
    assert inductor.record.lines() == ["Cpu_16x16"] * 3
    assert warnings_of(caplog) == []


def test_what_the_kernel_cannot_take_goes_to_aten_each_time(
    inductor: InductorSession, kernel_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    unaligned = torch.randn(16 * 64 + 1)[1:].view(16, 64)
    narrow = torch.randn(16, 66)[:, 1:65]
    strided = torch.randn(16, 128)[:, ::2]
    transposed = torch.randn(64, 16).t()
    nothing = torch.randn(0, 64)
    for other in (unaligned, narrow, strided, transposed, nothing):
        assert_computes(gemm, other, b)
    assert_computes(gemm, torch.randn(16, 0), torch.randn(0, 32))
    assert_computes(gemm, a, torch.randn(64, 33))
    assert inductor.record.lines() == []
    assert_computes(gemm, a, b)
    assert len(inductor.record.lines()) == 1
    assert warnings_of(caplog) == []


def test_shapes_that_do_not_multiply_fail_as_they_do_with_aten(
    inductor: InductorSession, kernel_id: str
) -> None:
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gemm(torch.randn(16, 64), torch.randn(60, 32), out=torch.empty(16, 32))


def test_a_wheel_whose_kernels_are_gone_is_named_once(
    inductor: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    for place in range(3):
        gemm = compiled.gemm(torch.mm, f"{place:064x}", WHEEL)
        for _ in range(2):
            assert_computes(gemm, a, b)
    (said,) = warnings_of(caplog)
    assert WHEEL in said
    assert "ATen" in said
    assert_computes(compiled.gemm(torch.mm, "f" * 64, "nvgemm-kernels-other 2.0"), a, b)
    assert "nvgemm-kernels-other 2.0" in warnings_of(caplog)[1]
    assert inductor.record.lines() == []


def test_a_kernel_for_another_device_is_missing_too(
    inductor: InductorSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from nvgemm_runtime.installed.registry import INSTALLATION

    inductor.use(write_synthetic_bundle(tmp_path / "gpu.nvgemm", "sm_90a"))
    (kernel_id,) = INSTALLATION.kernels()
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    assert_computes(gemm, torch.randn(16, 64), torch.randn(64, 32))
    (said,) = warnings_of(caplog)
    assert WHEEL in said
    assert "sm_90a" in said


def test_anything_that_fails_while_a_kernel_is_loaded_leaves_aten(
    inductor: InductorSession, kernel_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    from nvgemm_runtime.launch.loading.loader import KernelLoader

    def fail(*arguments: object) -> None:
        raise OSError("no memory of that kind")

    inductor.monkeypatch.setattr(KernelLoader, "load", fail)
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    assert_computes(gemm, torch.randn(16, 64), torch.randn(64, 32))
    (said,) = warnings_of(caplog)
    assert "no memory of that kind" in said


def test_threads_that_race_for_the_first_call(inductor: InductorSession, kernel_id: str) -> None:
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    outs = [torch.full((16, 32), float("nan")) for _ in range(8)]
    barrier = threading.Barrier(len(outs))

    def work(out: Tensor) -> None:
        barrier.wait()
        gemm(a, b, out=out)

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(outs, [a @ b] * len(outs))
    assert len(inductor.record.lines()) == len(outs)


@pytest.mark.slow
def test_a_kernel_that_fails_when_first_launched_leaves_aten(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one does that the driver cannot load: nothing of it was ever run here."""
    problem = cpu_provider.problem("tt")
    raising = recording_kernels.build_recording(
        [problem], tmp_path / "raising", kernel_cache, recording_kernels.Raising()
    )
    inductor.use(raising.path)
    gemm = compiled.gemm(torch.mm, raising.header.kernels[0].id, WHEEL)
    for _ in range(3):
        assert_computes(gemm, torch.randn(16, 64), torch.randn(64, 32))
    assert len(inductor.record.lines()) == 1, "it is not tried again"
    (said,) = warnings_of(caplog)
    assert WHEEL in said


@pytest.mark.parametrize("short_at", [0, 1, 2])
def test_a_kernel_without_memory_for_its_workspace_is_tried_again(
    inductor: InductorSession,
    short_at: int,
    kernel_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = native.load()
    calls = itertools.count()

    def try_launch(*arguments: object) -> bool:
        if next(calls) == short_at:
            raise torch.OutOfMemoryError("64 bytes cannot be allocated")
        return loaded.try_launch(*arguments)

    monkeypatch.setattr(native, "load", lambda: replace(loaded, try_launch=try_launch))
    gemm = compiled.gemm(torch.mm, kernel_id, WHEEL)
    for _ in range(3):
        assert_computes(gemm, torch.randn(16, 64), torch.randn(64, 32))
    assert len(inductor.record.lines()) == 2, "one was ATen's"
    (said,) = warnings_of(caplog)
    assert "64 bytes cannot be allocated; ATen computes this GEMM" in said


def test_switched_off_means_aten_and_no_word(
    inductor: InductorSession,
    kernel_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "off")
    assert_computes(
        compiled.gemm(torch.mm, kernel_id, WHEEL), torch.randn(16, 64), torch.randn(64, 32)
    )
    assert inductor.record.lines() == []
    assert warnings_of(caplog) == []


def test_code_in_caches_of_earlier_releases_finds_what_it_calls() -> None:
    assert old_name.gemm is compiled.gemm
