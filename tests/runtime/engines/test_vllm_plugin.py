"""What vLLM's processes do with the plug-in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_engines import FakeEngine
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY
from nvgemm_runtime.engines import vllm_plugin
from nvgemm_runtime.errors import RequiredError
from synthetic_bundles import write_synthetic_bundle

N, K = 32, 64
MakeVllm = Callable[..., FakeEngine]
EMBEDDING = "model_executor.layers.vocab_parallel_embedding"


def head_of(vllm: FakeEngine) -> tuple[Any, Callable[..., torch.Tensor]]:
    """A head and the call that vLLM's logits processor makes."""
    head = vllm(EMBEDDING).ParallelLMHead(N, K)
    return head, lambda x, bias=None: head.quant_method.apply(head, x, bias=bias)


def worker_of(vllm: FakeEngine, model: torch.nn.Module, sizes: list[int]) -> Any:
    runner = SimpleNamespace(get_model=lambda: model, capture=lambda: "captured")
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))
    return vllm("v1.worker.gpu_worker").Worker(runner, config)


@pytest.mark.parametrize("parameters", ["", "linear_backend='auto'"])
def test_the_head_is_computed_by_tables(
    session: InductorSession, vllm: MakeVllm, parameters: str
) -> None:
    engine = vllm(dispatch_parameters=parameters)
    vllm_plugin.activate()
    head, compute = head_of(engine)
    compute(torch.randn(1, K))  # loads kernels
    for m, operator in COMPUTED_BY.items():
        session.record.forget()
        x = torch.randn(m, K)
        torch.testing.assert_close(compute(x), x @ head.weight.t())
        assert session.record.lines() == ([] if operator is None else [operator]), m


def test_activates_twice_and_after_vllm_was_imported(
    session: InductorSession, vllm: MakeVllm
) -> None:
    engine = vllm()
    _, compute = head_of(engine)
    vllm_plugin.activate()
    vllm_plugin.activate()
    compute(torch.randn(1, K))
    session.record.forget()
    compute(torch.randn(8, K))
    assert len(session.record.lines()) == 1


def test_a_tied_weight_and_one_that_moved_are_read_at_each_call(
    session: InductorSession, vllm: MakeVllm
) -> None:
    """As after sleep mode or a reload: another tensor, other storage, or other values."""
    engine = vllm()
    vllm_plugin.activate()
    head, compute = head_of(engine)
    x = torch.randn(8, K)
    compute(x)
    head.weight = engine(EMBEDDING).VocabParallelEmbedding(N, K).weight
    torch.testing.assert_close(compute(x), x @ head.weight.t())
    head.weight.data = torch.randn(N, K)
    torch.testing.assert_close(compute(x), x @ head.weight.t())
    session.record.forget()
    head.weight.normal_()
    torch.testing.assert_close(compute(x), x @ head.weight.t())
    assert len(session.record.lines()) == 1


def test_a_compiled_graph_keeps_its_operator(session: InductorSession, vllm: MakeVllm) -> None:
    engine = vllm()
    vllm_plugin.activate()
    _, compute = head_of(engine)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(compute, backend=backend, fullgraph=True)(torch.randn(8, K))
    assert seen == [str(torch._C._nn.linear)]


@pytest.mark.parametrize("why", ["another platform", "batch invariance"])
def test_other_functions_of_vllm_stay(
    session: InductorSession, vllm: MakeVllm, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine = vllm()
    if why == "another platform":
        utilities = engine("model_executor.layers.utils")
        stock = utilities.cpu_unquantized_gemm
        monkeypatch.setattr(utilities, "dispatch_unquantized_gemm", lambda: stock)
    else:
        monkeypatch.setattr(engine("envs"), "VLLM_BATCH_INVARIANT", True)
    vllm_plugin.activate()
    _, compute = head_of(engine)
    session.record.forget()
    compute(torch.randn(8, K))
    assert session.record.lines() == []


@pytest.mark.parametrize("version", ["0.23.1", "0.34.0", "0.34.0rc1", "dev", "0.1.dev1+g12", "1"])
def test_stays_out_of_an_unknown_version_and_says_so_once(
    session: InductorSession, vllm: MakeVllm, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    engine = vllm(version)
    vllm_plugin.activate()
    vllm_plugin.activate()
    _, compute = head_of(engine)
    session.record.forget()
    compute(torch.randn(8, K))
    assert session.record.lines() == []
    assert caplog.messages == [
        "nvgemm-aot: lm_head and fp8 Linears stay with vLLM: vLLM is "
        f"{version}, supported is 0.24 to 0.33"
    ]


def test_stays_out_of_functions_that_changed(
    session: InductorSession,
    vllm: MakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = vllm()
    utilities = engine("model_executor.layers.utils")
    monkeypatch.setattr(utilities, "default_unquantized_gemm", lambda x, weight: x @ weight.t())
    monkeypatch.delattr(engine("v1.worker.gpu_worker").Worker, "compile_or_warm_up_model")
    vllm_plugin.activate()
    head_of(engine)
    assert caplog.messages == [
        "nvgemm-aot: the preload of kernels stays with vLLM: vllm.v1.worker.gpu_worker has no "
        "function Worker.compile_or_warm_up_model",
        "nvgemm-aot: lm_head stays with vLLM: vllm.model_executor.layers.utils."
        "default_unquantized_gemm takes (x, weight), must begin with (layer, x, weight, bias)",
    ]


def test_an_error_in_the_plug_in_costs_only_its_part(
    session: InductorSession,
    vllm: MakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    engine = vllm()
    monkeypatch.setattr("nvgemm_runtime.linear", fail, raising=False)
    monkeypatch.setattr("nvgemm_runtime.engines.rank_wheels.publish", fail)
    monkeypatch.setattr("nvgemm_runtime.engines.start_up.measure_coverage", fail)
    vllm_plugin.activate()
    head, compute = head_of(engine)
    x = torch.randn(8, K)
    for _ in range(2):
        torch.testing.assert_close(compute(x), x @ head.weight.t())
    model = torch.nn.Module()
    model.lm_head = head
    for _ in range(2):
        assert worker_of(engine, model, [1]).compile_or_warm_up_model() == "captured"
    reason = "stays with vLLM: RuntimeError: out of luck"
    assert caplog.messages == [
        f"nvgemm-aot: {part} {reason}"
        for part in ("a Linear", "the comparison of ranks", "the preload of kernels", "the report")
    ]


def test_off_changes_nothing(
    session: InductorSession, vllm: MakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "off")
    engine = vllm()
    before = list(sys.meta_path)
    vllm_plugin.activate()
    assert sys.meta_path == before
    assert "_head_gemm" not in str(engine(EMBEDDING).dispatch_unquantized_gemm())


def test_a_process_without_layers_imports_nothing(vllm: MakeVllm) -> None:
    vllm()
    vllm_plugin.activate()
    assert not [name for name in sys.modules if name.startswith("vllm.")]


def test_a_worker_loads_the_heads_kernels_before_it_captures_and_says_what_is_served(
    session: InductorSession, vllm: MakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    engine = vllm()
    vllm_plugin.activate()
    linears = engine("model_executor.layers.linear")
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([linears.Linear(N, K), linears.Linear(48, K)])
    model.lm_head = engine(EMBEDDING).ParallelLMHead(N, K)
    worker = worker_of(engine, model, [8, 16, 32, 100])
    loaded: list[int] = []
    worker.model_runner.capture = lambda: loaded.append(len(compiled_kernels())) or "captured"
    assert worker.compile_or_warm_up_model() == "captured"
    assert loaded == [2]
    (line,) = caplog.messages
    # The Linear of lm_head's shape counts too: its kernels are loaded, whoever asked for them.
    assert "bundled kernels serve 2 of 3 unquantised Linears (1 of 2 shapes), 33% of their " in line
    assert "calls at 4 sizes, m 8 to 100; 2 kernels are loaded; " in line
    assert line.endswith("; NVGEMM_AOT_BUNDLES")


def compiled_kernels() -> list[str]:
    from nvgemm_runtime.launch.compiled import named_kernels
    from nvgemm_runtime.launch.loading.loader import LOADER

    return [one for one in named_kernels() if LOADER.get(one) is not None]


def test_required_makes_a_kernel_that_cannot_be_loaded_an_error(
    session: InductorSession, vllm: MakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "required")
    engine = vllm()
    vllm_plugin.activate()
    model = torch.nn.Module()
    model.lm_head, _ = head_of(engine)
    worker = worker_of(engine, model, [8])

    def fail(*_: object) -> None:
        raise RuntimeError("damaged")

    monkeypatch.setattr("nvgemm_runtime.launch.preload.load_for", fail)
    with pytest.raises(RequiredError, match=r"2 kernels cannot be loaded: \w{12}: damaged"):
        worker.compile_or_warm_up_model()


def test_says_that_no_wheel_is_installed_while_other_ranks_have_one(
    session: InductorSession,
    vllm: MakeVllm,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session.use()
    engine = vllm()
    monkeypatch.setattr(
        "nvgemm_runtime.engines.rank_wheels.find_difference", lambda: "ranks have different wheels"
    )
    vllm_plugin.activate()
    assert worker_of(engine, torch.nn.Module(), []).compile_or_warm_up_model() == "captured"
    assert caplog.messages[0] == "nvgemm-aot: ranks have different wheels"
    assert caplog.messages[1].endswith(": no kernel wheel is installed")


def test_says_why_a_wheel_for_another_gpu_serves_nothing(
    session: InductorSession, vllm: MakeVllm, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir(mode=0o755)
    other = tmp_path / "other" / "other.nvgemm"
    write_synthetic_bundle(other, "sm_90a")
    session.use(other)
    engine = vllm()
    vllm_plugin.activate()
    model = torch.nn.Module()
    model.lm_head, compute = head_of(engine)
    x = torch.randn(8, K)
    torch.testing.assert_close(compute(x), x @ model.lm_head.weight.t())
    assert worker_of(engine, model, [1, 8]).compile_or_warm_up_model() == "captured"
    (line,) = caplog.messages
    assert "serve 0 of 1 unquantised Linears (0 of 1 shapes), 0% of their calls" in line
    assert line.endswith(
        "; NVGEMM_AOT_BUNDLES (unusable: built for sm_90a, this device is cpu); "
        "the reason: nvgemm-aot doctor"
    )


def test_lora_adds_to_the_base_product(session: InductorSession, vllm: MakeVllm) -> None:
    """As vLLM's wrapper does: it asks the base layer's method, and adds to the result in place."""
    engine = vllm()
    vllm_plugin.activate()
    head, _ = head_of(engine)
    wrapped = torch.nn.Module()
    wrapped.base_layer = head
    x, delta = torch.randn(8, K), torch.randn(8, N)
    wrapped.base_layer.quant_method.apply(wrapped.base_layer, x)
    session.record.forget()
    logits = wrapped.base_layer.quant_method.apply(wrapped.base_layer, x)
    assert len(session.record.lines()) == 1
    torch.testing.assert_close(logits.add_(delta), x @ head.weight.t() + delta)
