"""What is recorded of torch.compile: every GEMM of every graph, whatever becomes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor import config
from torch._inductor.kernel import mm as gemm_templates
from torch._inductor.select_algorithm import get_algorithm_selector_cache
from torch._inductor.virtualized import V

from fresh_processes import Home
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import BuiltBundle, plan_build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.inductor import entry_point, hook
from nvgemm_runtime.recording.recorder import Recorder
from nvgemm_runtime.recording.text import Recording

Tensor = torch.Tensor


@pytest.fixture
def path(inductor: InductorSession, tmp_path: Path) -> Path:
    """Where this process records to."""
    path = tmp_path / "out.yaml"
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(path))
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD_TARGET", "sm_90a")
    return path


def half(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def problems(recording: Recording) -> dict[str, int]:
    return {problem.key: count for problem, count in recording.problems.items()}


@pytest.mark.parametrize("max_autotune", [False, True])
def test_every_gemm_of_a_graph(inductor: InductorSession, path: Path, max_autotune: bool) -> None:
    def model(x: Tensor, w: Tensor, c: Tensor, bias: Tensor) -> Any:
        product = torch.addmm(bias, x, w.t())
        return x @ w.t(), (x + 1) @ w.t(), torch.bmm(c, c.mT), product, x[:, :33] @ x[:33, :32]

    with config.patch(max_autotune_gemm=max_autotune):
        inductor.compile(model, half(48, 64), half(32, 64), half(2, 16, 64), half(32))
    recording = Recorder(path).read()
    assert problems(recording) == {
        "mm/tn/bf16xbf16/fp32/bf16/m48n32k64": 2,
        "mm/tn/bf16xbf16/fp32/bf16/bias/m48n32k64": 1,
        "bmm/tn/bf16xbf16/fp32/bf16/b2m16n16k64": 1,
    }
    assert recording.undeclarable == {
        "mm of bf16[48, 33] and bf16[33, 32] into bf16[48, 32]: rows or columns are aligned to 2 "
        "bytes, kernels need 16 (layout tt)": 1,
    }
    assert recording.targets == {"sm_90a"}
    assert recording.name == "out"


def test_sums_are_declared_as_kernels_for_the_target_compute_them(
    inductor: InductorSession, path: Path
) -> None:
    """With their epilogue, or as a product into fp32 where no kernel adds such a thing."""
    for target in ("sm_90a", "sm_100f", "sm_103a"):
        torch._dynamo.reset()
        inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(path.with_stem(target)))
        inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD_TARGET", target)
        x, w, bias, column = half(48, 64), half(32, 64), half(32), half(48, 1)
        inductor.compile(lambda x, w, c: torch.addmm(c, x, w.t()), x, w, bias)
        inductor.compile(lambda x, w, c: torch.addmm(c, x, w.t()), x, w, column)
        recording = Recorder(path.with_stem(target)).read()
        assert problems(recording) == {
            "mm/tn/bf16xbf16/fp32/bf16/bias/m48n32k64": 1,
            "mm/tn/bf16xbf16/fp32/fp32/m48n32k64": 1,
        }
        assert recording.targets == {target}
        assert not recording.undeclarable


def test_gradients(inductor: InductorSession, path: Path) -> None:
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    result = inductor.compile(linear, half(48, 64).requires_grad_()).result
    result.backward(half(48, 32))
    assert problems(Recorder(path).read()) == {
        "mm/tn/bf16xbf16/fp32/bf16/m48n32k64": 1,
        "mm/nt/bf16xbf16/fp32/bf16/m32n64k48": 1,
        "mm/tt/bf16xbf16/fp32/bf16/m48n64k32": 1,
    }


def test_what_is_covered_is_recorded_as_well(
    inductor: InductorSession, path: Path, recording_bundle: BuiltBundle
) -> None:
    """Bundled kernels for bf16 win, and the GEMM stands in the recording all the same."""
    inductor.slow_down_aten()
    compiled = inductor.compile(torch.mm, half(16, 64), half(64, 32))
    assert len(compiled.launched) == 1
    assert problems(Recorder(path).read()) == {"mm/tt/bf16xbf16/fp32/bf16/m16n32k64": 1}


def test_what_is_compiled_again_counts_again(inductor: InductorSession, path: Path) -> None:
    """Torch's caches would give the graph without a GEMM being met."""
    a, b = half(16, 64), half(64, 32)
    for _ in range(3):
        torch._dynamo.reset()
        inductor.compile(lambda a, b: a @ b, a, b)
    assert problems(Recorder(path).read()) == {"mm/tt/bf16xbf16/fp32/bf16/m16n32k64": 3}


def test_a_dynamic_size_counts_as_the_one_that_was_compiled_for(
    inductor: InductorSession, path: Path
) -> None:
    a = half(24, 64)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = inductor.compile(torch.mm, a, half(64, 32), dynamic=None)
    compiled.function(half(40, 64), half(64, 32))
    assert problems(Recorder(path).read()) == {"mm/tt/bf16xbf16/fp32/bf16/m24n32k64": 1}


def test_without_aten_the_graph_says_what_is_multiplied(
    inductor: InductorSession, path: Path
) -> None:
    """No other backend's choices can be had on a CPU: ATen's are shown without their names."""
    functions = get_algorithm_selector_cache().preprocessing_fns

    def join_nameless(choices: list[Any]) -> list[Any]:
        hook.join([SimpleNamespace(input_nodes=c.input_nodes, layout=c.layout) for c in choices])
        return choices

    inductor.monkeypatch.setattr(
        get_algorithm_selector_cache(),
        "preprocessing_fns",
        [join_nameless if function is entry_point.join else function for function in functions],
    )
    inductor.compile(lambda a, b, c: (a @ b, c @ c.mT), half(16, 64), half(64, 32), half(2, 8, 64))
    assert problems(Recorder(path).read()) == {
        "mm/tt/bf16xbf16/fp32/bf16/m16n32k64": 1,
        "bmm/tn/bf16xbf16/fp32/bf16/b2m8n8k64": 1,
    }


def test_other_ways_to_compute_a_gemm_are_not_met(inductor: InductorSession, path: Path) -> None:
    from nvgemm_runtime.inductor.reading import is_alternative

    templates = [
        gemm_templates.decompose_k_subgraph_template,
        gemm_templates.mm_contiguous_subgraph_template,
        gemm_templates.addmm_contiguous_subgraph_template,
    ]
    for template in templates:
        for name in (f"{template.name}_3", f"benchmark_{template.name}_k_split_4_3"):
            with V.set_graph_handler(SimpleNamespace(name=name)):
                assert is_alternative()


@pytest.mark.slow
def test_a_recording_is_built_from_unchanged(
    inductor: InductorSession, path: Path, kernel_cache: Cache
) -> None:
    def model(a: Tensor, b: Tensor, c: Tensor) -> Any:
        # One of each kind that could be met and be impossible to build for.
        return a @ b, c @ c.mT, a[:, :33] @ b[:33], a.float() @ b.float(), a[:1] @ b[:, :8]

    inductor.compile(model, half(16, 64), half(64, 32), half(2, 16, 64))
    manifest = load_manifest(path)
    (planned,) = plan_build(manifest, kernel_cache)
    assert [entry.problem.key for entry in planned.plan.problems] == [
        declared.problem.key for declared in manifest.declared
    ]
    assert len(manifest.declared) == 3
    assert not planned.plan.unserved


def test_a_place_that_cannot_be_written_stops_the_first_compilation(
    inductor: InductorSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inductor.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(tmp_path / "missing/out.yaml"))
    with pytest.raises(Exception, match=r"RecordError: .*/missing/out\.yaml: cannot record GEMMs"):
        inductor.compile(torch.mm, half(16, 64), half(64, 32))
    assert warnings_of(caplog) == []


def test_nothing_is_recorded_where_nobody_asked(inductor: InductorSession, tmp_path: Path) -> None:
    inductor.monkeypatch.delenv("NVGEMM_AOT_RECORD", raising=False)
    inductor.monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    inductor.compile(torch.mm, half(16, 64), half(64, 32))
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.mark.slow
def test_processes_with_warm_caches_meet_their_gemms(home: Home) -> None:
    """And a relative path is taken from where torch was imported."""
    assert home.run().misses == 1
    leave = "os.mkdir('elsewhere'); os.chdir('elsewhere'); os.system('echo $NVGEMM_AOT_RECORD >&2')"
    ran = home.run(after=leave, variables={"NVGEMM_AOT_RECORD": "out.yaml"})
    assert ran.count(f"{home.directory}/out.yaml\n") == 1
    assert (ran.right, ran.hits) == ([True, True], 0)
    ((said, count),) = Recorder(home.directory / "out.yaml").read().undeclarable.items()
    assert ": fp32 is not multiplied by any operator" in said
    assert count == 2, "the model has two, which differ in layout"


@pytest.mark.slow
def test_what_cannot_be_recorded_is_said_at_the_import_of_torch(home: Home) -> None:
    ran = home.run(compiles=False, variables={"NVGEMM_AOT_RECORD": "missing/out.yaml"})
    assert ran.count("missing/out.yaml: cannot record GEMMs there: No such file") == 1


@pytest.mark.slow
def test_off_records_nothing_and_says_so(home: Home) -> None:
    ran = home.run(variables={"NVGEMM_AOT": "off", "NVGEMM_AOT_RECORD": "out.yaml"})
    assert ran.right == [True, True]
    assert ran.count("NVGEMM_AOT=off: nothing is recorded in out.yaml") == 1
    assert not (home.directory / "out.yaml").exists()
