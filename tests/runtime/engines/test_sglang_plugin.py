"""What SGLang's processes do with the plug-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fake_engines import FakeEngine
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY
from nvgemm_runtime.engines import sglang_plugin

N, K = 32, 64
MakeSglang = Callable[..., FakeEngine]
UNQUANTIZED = "srt.layers.quantization.unquant"


def test_linears_are_computed_by_tables(session: InductorSession, sglang: MakeSglang) -> None:
    engine = sglang()
    sglang_plugin.activate()
    layer = engine(UNQUANTIZED).Linear(N, K)
    layer(torch.randn(1, K))  # loads kernels
    for m, operator in COMPUTED_BY.items():
        session.record.forget()
        x = torch.randn(m, K)
        torch.testing.assert_close(layer(x), x @ layer.weight.t())
        assert session.record.lines() == ([] if operator is None else [operator]), m


@pytest.mark.parametrize("why", ["backend", "platform", "batch invariance"])
def test_other_products_of_sglang_stay(
    session: InductorSession, sglang: MakeSglang, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine = sglang()
    sglang_plugin.activate()
    unquantized = engine(UNQUANTIZED)
    if why == "backend":
        backend = unquantized.Bf16GemmBackend.CUTEDSL
        monkeypatch.setattr(unquantized, "backend", backend)
    elif why == "platform":
        monkeypatch.setattr(unquantized, "_is_cuda", False)
    else:
        monkeypatch.setattr(engine("srt.batch_invariant_ops"), "on", True)
    session.record.forget()
    unquantized.Linear(N, K)(torch.randn(8, K))
    assert session.record.lines() == []


def test_stays_out_of_an_unknown_version_and_says_so_once(
    session: InductorSession, sglang: MakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sglang("0.5.24.post1")
    sglang_plugin.activate()
    sglang_plugin.activate()
    session.record.forget()
    engine(UNQUANTIZED).Linear(N, K)(torch.randn(8, K))
    assert session.record.lines() == []
    assert caplog.messages == [
        "nvgemm-aot: every Linear stays with SGLang: SGLang is 0.5.24.post1, "
        "supported is 0.5.20 to 0.5.23"
    ]


def test_a_runner_says_what_is_served_after_it_captured(
    session: InductorSession, sglang: MakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sglang()
    sglang_plugin.activate()
    layer = engine(UNQUANTIZED).Linear(N, K)
    layer(torch.randn(8, K))
    model = torch.nn.Sequential(layer, engine(UNQUANTIZED).Linear(48, K))
    runner = engine("srt.model_executor.model_runner").ModelRunner(model, [8, 16])
    assert runner.init_cuda_graphs(capture_decode_cuda_graph=True) is model
    (line,) = caplog.messages
    assert "serve 1 of 2 unquantised Linears (1 of 2 shapes), 50% of their calls at 2 " in line
