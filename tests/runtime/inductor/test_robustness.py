"""Whatever is wrong with nvgemm-aot or a bundle, torch.compile goes on without it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_provider
import nvgemm_runtime
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.installed.registry import INSTALLATION
from nvgemm_runtime.launch.loading import native
from synthetic_bundles import write_synthetic_bundle
from written_wheels import write_wheel

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def kernels_win(inductor: InductorSession) -> None:
    inductor.slow_down_aten()


def compile_gemms(inductor: InductorSession) -> tuple[int, str]:
    """Compile two GEMMs and check them; how many ran on a bundled kernel, and the code."""
    a, b = torch.randn(16, 64), torch.randn(64, 32)

    def model(a: Tensor, b: Tensor) -> Any:
        return a @ b, a[:8] @ b

    compiled = inductor.compile(model, a, b)
    torch.testing.assert_close(compiled.result, model(a, b))
    return len(compiled.launched), compiled.code[0]


def test_a_mistake_of_ours_is_said_once_and_compiling_goes_on(
    inductor: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    from nvgemm_runtime.inductor import report

    def fail(*arguments: object) -> None:
        raise RuntimeError("wrong on purpose")

    inductor.monkeypatch.setattr(INSTALLATION, "index", fail)
    report._logged.clear()
    launched, code = compile_gemms(inductor)
    assert launched == 0
    assert "nvgemm" not in code
    (message,) = warnings_of(caplog)
    assert "RuntimeError: wrong on purpose" in message
    report._logged.clear()


def test_without_any_choice_there_is_nothing_to_say(
    inductor: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    from nvgemm_runtime.inductor import hook

    assert hook.join([]) == []
    assert warnings_of(caplog) == []


def test_a_cache_key_that_cannot_be_made_is_no_reason_to_fail(
    inductor: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    from nvgemm_runtime.inductor.configuration import choices_key

    def fail() -> None:
        raise OSError("no such luck")

    inductor.monkeypatch.setattr("nvgemm_runtime.installed.digest.find_bundles", fail)
    choices_key._log_once.cache_clear()
    compile_gemms(inductor)
    compile_gemms(inductor)
    assert [message for message in warnings_of(caplog) if "no such luck" in message] == [
        "torch's compile cache keys lack the installed bundles: OSError: no such luck"
    ]
    choices_key._log_once.cache_clear()


def test_a_kernel_that_fails_when_it_is_timed_is_not_chosen(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raising = recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path / "raising", kernel_cache, recording_kernels.Raising()
    )
    inductor.use(raising.path)
    launched, code = compile_gemms(inductor)
    assert launched == 0
    assert "nvgemm" not in code
    assert any("out of patience" in message for message in warnings_of(caplog))
    assert "out of patience" in nvgemm_runtime.stats().failed[raising.header.kernels[0].id]


def test_without_the_native_library_aten_computes(
    inductor: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    inductor.monkeypatch.setattr(native, "_loaded", None)
    inductor.monkeypatch.setattr(native, "_LIBRARY", "missing.so")
    launched, code = compile_gemms(inductor)
    assert launched == 0
    assert "nvgemm" not in code
    (said,) = warnings_of(caplog)
    assert "missing.so is missing" in said, "once, however many kernels and GEMMs there are"


@pytest.mark.parametrize("archs", [(), ("sm_90a",)])
def test_without_a_bundle_for_this_device_there_is_nothing_to_say(
    inductor: InductorSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    archs: tuple[str, ...],
) -> None:
    inductor.use(*(write_synthetic_bundle(tmp_path / "gpu.nvgemm", arch) for arch in archs))
    launched, code = compile_gemms(inductor)
    assert launched == 0
    assert "nvgemm" not in code
    assert warnings_of(caplog) == []


def test_broken_and_foreign_bundles_do_not_hide_a_good_one(
    inductor: InductorSession,
    recording_bundle: BuiltBundle,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = recording_bundle.path
    broken, noise = tmp_path / "broken.nvgemm", tmp_path / "noise.nvgemm"
    broken.write_bytes(good.read_bytes()[:100])
    noise.write_bytes(b"\xff" * 4096)
    foreign = write_synthetic_bundle(tmp_path / "foreign.nvgemm", "sm_90a", platform="win_amd64")
    missing = tmp_path / "missing.nvgemm"
    inductor.use(broken, noise, missing, foreign, good)
    launched, _ = compile_gemms(inductor)
    assert launched == 2
    said = warnings_of(caplog)
    assert [sum(path.name in message for message in said) for path in (broken, noise, missing)] == [
        1,
        1,
        1,
    ]


def test_two_wheels_with_the_same_problems_and_kernels(
    inductor: InductorSession,
    recording_bundle: BuiltBundle,
    kernel_cache: Cache,
    tmp_path: Path,
) -> None:
    other = recording_kernels.build_recording(
        [cpu_provider.problem()],
        tmp_path / "other",
        kernel_cache,
        recording_kernels.Sleeping(),
        candidates=2,
    )
    inductor.use_wheels(
        *(
            write_wheel([bundle.path], name=name, version="1.0", out_dir=tmp_path)
            for name, bundle in (("a", recording_bundle), ("b", recording_bundle), ("c", other))
        )
    )
    with inductor.watch_choices() as seen:
        launched, code = compile_gemms(inductor)
    assert launched == 2
    assert all(len(set(names)) == len(names) for names in seen)
    assert code.count("'nvgemm-kernels-a 1.0'") == 1


def test_threads_compile_and_call_at_once(inductor: InductorSession) -> None:
    b = torch.randn(64, 32)
    results: list[list[Tensor]] = [[] for _ in range(4)]
    barrier = threading.Barrier(len(results))
    # Settings of torch can be those of one thread: here they come with the function.
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}
    shared = torch.compile(lambda a, b: a @ b, dynamic=False, options=options)
    operands = [torch.randn(8 * (place // 2 + 1), 64) for place in range(len(results))]
    expected = [a @ b for a in operands]

    def work(place: int) -> None:
        barrier.wait()
        results[place] += (shared(operands[place], b) for _ in range(20))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, right in zip(results, expected):
        assert len(got) == 20
        torch.testing.assert_close(got, [right] * 20)
    for a in operands:
        assert len(inductor.launched(shared, a, b)) == 1
