"""Bundled kernels in generated C++: cpp_wrapper's modules, and packages of AOTInductor."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fresh_processes import Home, Ran
from inductor_session import InductorSession
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.inductor.codegen import cpp
from repository import SUPPORT

HERE = Path(__file__).parent

Tensor = torch.Tensor
Operands = tuple[Tensor, Tensor, Tensor]


class Model(torch.nn.Module):
    """A Linear without a bias, something behind it that is fused, and a batched GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(32 * 64.0).view(32, 64) % 7)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(a @ self.weight.T), torch.bmm(b, b)


def operands(m: int = 16) -> tuple[Tensor, Tensor]:
    """Small whole numbers: every sum is exact, whoever computes it."""
    return torch.arange(m * 64.0).view(m, 64) % 5 - 2, torch.arange(2 * 8 * 8.0).view(2, 8, 8) % 3


@pytest.mark.slow
def test_cpp_wrapper_tries_the_kernel_and_has_the_stock_call_behind_it(
    inductor: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor.slow_down_aten()
    model, arguments = Model(), operands()
    with torch.no_grad():
        compiled = inductor.compile(model, *arguments, options={"cpp_wrapper": True})
        expected = model(*arguments)
        for got, wanted in zip(compiled.result, expected):
            assert torch.equal(got, wanted)
        assert len(compiled.launched) == 2
        code = "\n".join(compiled.code)
        assert code.count("nvgemm_aot::gemm(") == 2
        assert code.count("namespace nvgemm_aot {") == 1
        assert "aoti_torch_cpu_mm_out(" in code
        assert "aoti_torch_cpu_bmm_out(" in code
        # A view that begins in the middle of 16 bytes: the kernel refuses, the stock call serves.
        shifted = torch.zeros(16 * 64 + 1)[1:].view(16, 64).copy_(arguments[0])
        assert len(inductor.launched(compiled.function, shifted, arguments[1])) == 1
        for got, wanted in zip(compiled.function(shifted, arguments[1]), expected):
            assert torch.equal(got, wanted)


def test_quotes_in_an_origin_do_not_end_the_text() -> None:
    given = cpp.Operands(a="a", b="b", out="out")
    condition = cpp.condition("handle", "0" * 64, 'a"b\\c', given)
    assert '"a\\"b\\\\c"' in condition


LOAD = """
import torch
model = torch._inductor.aoti_load_package({path!r})
for m in (16, 5, 48):
    a = torch.arange(m * 64.0).view(m, 64) % 5 - 2
    b = torch.arange(2 * 8 * 8.0).view(2, 8, 8) % 3
    weight = torch.arange(32 * 64.0).view(32, 64) % 7
    got = model(a, b)
    right.append(torch.equal(got[0], torch.relu(a @ weight.T)) and torch.equal(got[1], b @ b))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def package(recording_bundle: BuiltBundle, home: Home) -> dict[str, Ran]:
    """A package with a dynamic m, made in one process and loaded in others."""
    path = str(home.directory / "model.pt2")
    bundles = {"NVGEMM_AOT_BUNDLES": str(recording_bundle.path)}
    make = f"""
import sys, time
sys.path[:0] = {[*map(str, (HERE, SUPPORT))]!r}
from test_generated_cpp import Model, operands
from torch._inductor.select_algorithm import extern_kernels
for name in ("mm", "bmm"):
    setattr(extern_kernels, name, lambda *a, real=getattr(torch, name), **k: (
        time.sleep(0.02), real(*a, **k))[1])
m = torch.export.Dim("m", min=2, max=512)
with torch.no_grad():
    program = torch.export.export(Model(), operands(), dynamic_shapes={{"a": {{0: m}}, "b": None}})
    torch._inductor.aoti_compile_and_package(
        program, package_path={path!r},
        inductor_configs={{"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}})
"""
    load = LOAD.format(path=path)
    made = home.run(compiles=False, after=make, variables=bundles)
    loads = {
        "with bundles": (load, bundles),
        "off": (load, {"NVGEMM_AOT": "off"}),
        "misspelt": (
            f"try:\n{textwrap.indent(load, ' ')}\nexcept Exception as error:\n print(error)\n",
            bundles | {"NVGEMM_AOT": "requird"},
        ),
        "without kernels": ("import nvgemm_runtime\nnvgemm_runtime.load_operators()\n" + load, {}),
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(home.run, compiles=False, after=after, variables=variables)
            for name, (after, variables) in loads.items()
        }
        return {"made": made, **{name: run.result() for name, run in runs.items()}}


@pytest.mark.slow
def test_a_package_runs_kernels_where_they_are_installed(package: dict[str, Ran]) -> None:
    ran = package["with bundles"]
    assert ran.right == [True, True, True]
    assert len(ran.launched) == 6, "three calls of two GEMMs, for every m"
    assert ran.count("WARNING") + ran.count("warning") == 0


@pytest.mark.slow
def test_a_package_is_right_where_the_plug_in_is_off(package: dict[str, Ran]) -> None:
    ran = package["off"]
    assert ran.right == [True, True, True]
    assert ran.launched == []
    assert not any(name.startswith("nvgemm_runtime.launch.loading.native") for name in ran.at_end)
    assert "nvgemm" not in ran.said, "nothing is logged either"


@pytest.mark.slow
def test_a_package_stops_where_the_mode_is_misspelt(package: dict[str, Ran]) -> None:
    ran = package["misspelt"]
    assert (ran.right, ran.launched) == ([], [])
    assert "NVGEMM_AOT=requird: allowed are auto, required, off" in ran.said


@pytest.mark.slow
def test_a_package_says_once_which_wheel_is_missing(package: dict[str, Ran]) -> None:
    ran = package["without kernels"]
    assert ran.right == [True, True, True]
    assert ran.launched == []
    assert ran.count("a compiled graph runs GEMMs on ATen instead of the kernels of") == 1


@pytest.mark.slow
def test_what_torch_puts_together_from_parts_is_defined_once(
    inductor: InductorSession, tmp_path: Path
) -> None:
    """Constant folding compiles a part of its own, whose text torch adds to the rest."""

    class Folded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.arange(64 * 64.0).view(64, 64) % 3)
            self.second = torch.nn.Parameter(torch.arange(64 * 64.0).view(64, 64) % 2)

        def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
            return (self.first @ self.second).relu(), a @ self.first

    inductor.slow_down_aten()
    model, a = Folded(), torch.arange(16 * 64.0).view(16, 64) % 5
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (a,)),
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs={"aot_inductor.use_runtime_constant_folding": True},
        )
        loaded = torch._inductor.aoti_load_package(path)
        for got, wanted in zip(loaded(a), model(a)):
            assert torch.equal(got, wanted)
    assert len(inductor.launched(loaded, a)) >= 1


HALF_LOADED = """
import importlib.resources, tvm_ffi
with importlib.resources.as_file(
    importlib.resources.files("nvgemm_runtime").joinpath("_native.so")
) as path:
    tvm_ffi.load_module(path)  # the library is there, its operators are not
"""


@pytest.mark.slow
def test_a_library_without_operators_counts_as_none(package: dict[str, Ran], home: Home) -> None:
    load = LOAD.format(path=str(home.directory / "model.pt2"))
    ran = home.run(compiles=False, after=HALF_LOADED + load, variables={"NVGEMM_AOT": "off"})
    assert ran.right == [True, True, True]
    assert ran.launched == []
