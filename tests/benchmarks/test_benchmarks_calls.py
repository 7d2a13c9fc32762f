"""benchmarks.runtime.calls: its chains and its arithmetic."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch.autograd import DeviceType

import cpu_provider
import tuning_bench
from benchmarks.runtime import calls, chains
from benchmarks.runtime.chains import Language, Row, Way
from benchmarks.runtime.made_up import Square, made_up_rankings
from inductor_session import InductorSession
from kernels_by_m import SQUARE as SQUARE_TILE
from kernels_by_m import WIDE
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.launch import linear as linear_module

PROBLEM = cpu_provider.problem(sizes=(32, 32, 32))

SMALL = Square(device="cpu", signature=PROBLEM.signature, size=32)


@pytest.fixture(scope="module")
def bundle(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a bundle whose only ranking is an estimate."""
    directory = tmp_path_factory.mktemp("calls")
    directory.chmod(0o755)
    return tuning_bench.build([PROBLEM], directory / "built", kernel_cache)


@pytest.fixture
def made_up(inductor: InductorSession, bundle: Path) -> Iterator[InductorSession]:
    inductor.use(bundle)
    with made_up_rankings(SMALL), chains.in_default_mode():
        yield inductor


def test_functions_run_the_kernel_or_aten_as_the_row_says(made_up: InductorSession) -> None:
    found = calls.functions(SMALL)
    assert list(found) == list(Row)
    launched = {row: made_up.launched(call) for row, call in found.items()}
    (fastest,) = launched[Row.KERNEL]
    assert fastest in (SQUARE_TILE, WIDE, "Cpu_1x1")
    assert launched[Row.BY_M_KERNEL] == (fastest,)
    assert {row for row, names in launched.items() if not names} == set(chains.RUNS_ATEN)
    for call in found.values():
        out = call()
        assert isinstance(out, torch.Tensor)
        assert out.isfinite().all()


def test_linears_run_the_kernel_or_torch_as_the_row_says(
    made_up: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "_plans", {})
    with torch.no_grad():
        found = calls.linears(SMALL)
        found[Row.BY_M_KERNEL]()  # loads the kernels
        assert tuple(found) == calls.EAGER_ROWS
        launched = {row: made_up.launched(call) for row, call in found.items()}
        (fastest,) = made_up.launched(calls.functions(SMALL)[Row.KERNEL])
        assert launched[Row.BY_M_KERNEL] == (fastest,)
        assert {row for row, names in launched.items() if not names} == set(chains.RUNS_ATEN)
        a, b = chains.operands(SMALL, Row.STOCK)
        for row in (Row.STOCK, Row.BY_M_KERNEL):
            torch.testing.assert_close(found[row](), a @ b)


def test_a_table_that_says_too_little_is_refused(inductor: InductorSession, bundle: Path) -> None:
    inductor.use(bundle)
    with pytest.raises(click.ClickException, match="must have 3 bounds and two kernels"):
        calls.functions(SMALL)  # estimates alone


def test_without_two_kernels_of_the_signature_it_says_what_to_build(
    inductor: InductorSession, bundle: Path
) -> None:
    inductor.use(bundle)
    other = cpu_provider.problem("tn").signature
    with (
        pytest.raises(click.ClickException, match=r"build benchmarks/runtime/manifest\.yaml"),
        made_up_rankings(Square(device="cpu", signature=other, size=32)),
    ):
        pass


def assert_chains_launch(session: InductorSession, language: Language) -> None:
    """Checks that chains launch the kernel, called directly and by dispatch."""
    (fastest,) = session.launched(calls.functions(SMALL)[Row.KERNEL])
    for way in Way:
        chain = chains.compile_chain(SMALL, 3, way, language)
        named = chains.chain_calls(SMALL, [chain])
        for row, call in zip(chains.ROWS_OF[way], named.values()):
            a, b = chains.operands(SMALL, row)
            torch.testing.assert_close(chain.function(a, b), a @ b @ b @ b)
            expected = () if row in chains.RUNS_ATEN else (fastest,) * 3
            assert session.launched(call) == expected, row


def test_chains_in_python_call_what_they_should(made_up: InductorSession) -> None:
    assert_chains_launch(made_up, Language.PYTHON)


def test_a_chain_that_calls_something_else_is_refused(
    made_up: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_MAX_CHOICES", "0")
    with pytest.raises(click.ClickException, match=r"calls \[\{'stock': 3\}\]; must be one"):
        chains.compile_chain(SMALL, 3, Way.KERNEL, Language.PYTHON)


def test_operands_lie_as_the_signature_says_and_a_chain_does_not_grow() -> None:
    square = Square(device="cpu", signature=chains.SQUARE.signature, size=32)
    a, b = chains.operands(square, Row.KERNEL)
    assert (a.shape, a.stride(), b.stride()) == ((32, 32), (32, 1), (1, 32))
    assert chains.operands(square, Row.BY_M_ATEN)[0].shape == (33, 32)
    product = a.double()
    for _ in range(chains.LONG):
        product = product @ b.double()
    assert product.norm().item() == pytest.approx(a.double().norm().item(), rel=0.1)


def test_cpp_with_a_kernel_has_the_stock_call_behind_it() -> None:
    stock = "aoti_torch_cuda_mm_out(buf0, a, b)"
    by_m = "if (!nvgemm_aot::gemm_by_rows(a, b, buf0, {}, table)) {"
    kernel = 'if (!nvgemm_aot::gemm(a, b, buf0, {}, "id", "wheel", kernel)) {'
    code = "\n".join([kernel, stock, by_m, stock, by_m, stock, stock])
    expected = Counter({Way.KERNEL: 1, Way.BY_M: 2, Way.STOCK: 1})
    assert chains.calls_in(code, Language.CPP) == expected


def test_a_product_takes_what_more_of_them_take_longer() -> None:
    more = chains.LONG - chains.SHORT
    assert chains.by_difference([50.0, 80.0], [50.0 + 4 * more, 80.0 + 5 * more]) == [4.0, 5.0]


def test_what_ran_is_held_against_what_atens_calls_ran() -> None:
    right = {
        "a": (Row.STOCK, frozenset({"cublas"})),
        "b": (Row.STOCK_BESIDE, frozenset({"cublas_odd"})),
        "c": (Row.KERNEL, frozenset({"bundled"})),
        "d": (Row.BY_M_ATEN, frozenset({"cublas_odd"})),
    }
    chains.check_what_ran(right)
    for wrong in (
        {"c": (Row.KERNEL, frozenset({"cublas"}))},
        {"c": (Row.KERNEL, frozenset[str]())},
        {"e": (Row.BY_M_KERNEL, frozenset({"another"}))},
        {"d": (Row.BY_M_ATEN, frozenset({"bundled"}))},
    ):
        with pytest.raises(click.ClickException, match=f"{next(iter(wrong))} ran"):
            chains.check_what_ran({**right, **wrong})


def times(kernel: float, by_m: float) -> dict[str, list[float]]:
    usual = {row.value: [10.0] for row in Row}
    return {**usual, Row.KERNEL.value: [kernel], Row.BY_M_KERNEL.value: [by_m]}


def test_calls_of_the_host_and_fills_are_no_kernels() -> None:
    def event(name: str, where: torch.autograd.DeviceType) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=where)

    # As a profiler has them: equal to torch's own, but other objects.
    gpu, host = (torch.autograd.DeviceType(int(one)) for one in (DeviceType.CUDA, DeviceType.CPU))
    assert gpu is not DeviceType.CUDA
    events = [
        event("cudaLaunchKernel", host),
        event("a kernel", gpu),
        event("Memset (Device)", gpu),
        event("cudaDeviceSynchronize", host),
    ]
    assert chains.kernels_among(events) == {"a kernel"}


def test_goals_are_judged_by_medians() -> None:
    python, cpp = times(5.0, 5.2), times(5.5, 5.0)
    said = calls.goals(times(7.0, 7.5), {"Python": python, "C++": cpp})
    assert calls.goals(times(7.0, 7.5), {"Python": python}) == said[:4]
    assert said == [
        "functions: kernel at most 0.6 x stock: 0.70 x, missed",
        "functions: by m at most 0.3 us more than kernel: +0.50 us, missed",
        "chains in Python: kernel at most 0.6 x stock: 0.50 x, met",
        "chains in Python: by m at most 0.3 us more than kernel: +0.20 us, met",
        "chains in C++: kernel at most 0.6 x stock: 0.55 x, met",
        "chains in C++: by m at most 0.3 us more than kernel: -0.50 us, met",
        "chains: kernel in C++ at most as in Python: 5.50 and 5.00 us, missed",
        "chains: by m, kernel in C++ at most as in Python: 5.00 and 5.20 us, met",
    ]


@pytest.fixture
def without_gpu(
    inductor: InductorSession, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> InductorSession:
    """Makes the command work on `SMALL`, in this process alone."""
    inductor.use(bundle)
    monkeypatch.setattr(linear_module, "_plans", {})
    monkeypatch.setattr(calls, "SQUARE", SMALL)
    for module in (calls, chains):
        monkeypatch.setattr(module, "SHORT", 1)
        monkeypatch.setattr(module, "LONG", 3)
    monkeypatch.setattr(calls, "WINDOWS", 2)
    monkeypatch.setattr(calls, "require_gpu", lambda: None)
    monkeypatch.setattr(calls, "environment", lambda: {"gpu": "a CPU", "torch": "2"})
    monkeypatch.setattr(chains, "_cpp_compiled_beside", contextlib.nullcontext)
    return inductor


@pytest.mark.slow
def test_the_command_measures_all_and_shows_it(
    without_gpu: InductorSession, tmp_path: Path
) -> None:
    path = tmp_path / "calls.json"
    ran = CliRunner().invoke(calls.main, ["--json", str(path)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    shown = ran.output.splitlines()
    for row in Row:
        tables = 3 + (row in calls.EAGER_ROWS)
        assert sum(line.startswith(f"  {row.value:<32} ") for line in shown) == tables
    assert sum(line.endswith((", met", ", missed")) for line in shown) == 8
    found = json.loads(path.read_text())
    tables = [found["functions_us"], *(found["chains_us"][one.value] for one in Language)]
    for table in tables:
        assert {row: len(values) for row, values in table.items()} == {row.value: 2 for row in Row}
    assert set(found["linears_us"]) == {row.value for row in calls.EAGER_ROWS}
    records = [json.loads(line) for line in path.with_suffix(".jsonl").open()]
    cases = {record["case"]: record["baseline"]["name"] for record in records}
    assert cases["linear/by m, kernel"] == "stock"
    assert len(cases) == 3 * len(Row) + len(calls.EAGER_ROWS)


@pytest.mark.usefixtures("without_gpu")
def test_compiling_alone_fills_a_directory_and_measures_nothing(tmp_path: Path) -> None:
    alone = ["--python-only", "--compile-only"]
    refused = CliRunner().invoke(calls.main, alone)
    assert refused.exit_code == 2
    assert "keeps what it compiles in --cache; name one" in refused.output
    directory = tmp_path / "compiled"
    ran = CliRunner().invoke(
        calls.main, [*alone, "--cache", str(directory)], catch_exceptions=False
    )
    assert (ran.exit_code, ran.output) == (0, "")
    assert list(directory.rglob("*.py"))


@pytest.mark.slow
def test_another_process_compiles_one_chain(
    without_gpu: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_chain = chains.compile_chain

    def noting(*arguments: Any) -> Any:
        compiled.append(compile_chain(*arguments))
        return compiled[-1]

    monkeypatch.setattr(calls, "compile_chain", noting)
    ran = CliRunner().invoke(calls.main, ["--compile", "by-m-3"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    (one,) = compiled
    assert (one.length, one.way, one.language) == (3, Way.BY_M, Language.CPP)
