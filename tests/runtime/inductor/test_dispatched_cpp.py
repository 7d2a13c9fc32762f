"""Kernels by m in generated C++: cpp_wrapper's modules, and packages of AOTInductor."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.utils import cpp_extension

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import recording_kernels
import tuning_bench
from fresh_processes import Home, Ran, pip_install
from inductor_session import Compiled, InductorSession, warnings_of
from kernels_by_m import COMPUTED_BY, SQUARE, TIMES, WIDE, assert_right_from_threads, operands
from measured_bundles import write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import DType, Op, Problem
from nvgemm_runtime.inductor.codegen import cpp
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.matching import thresholds

Tensor = torch.Tensor

BIASED = cpu_kernels.signature("tn", operand=DType.BF16, epilogue=BIAS)


def problems() -> list[Problem]:
    """A product in fp32, and a sum in bf16."""
    products = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    return products + [cpu_provider.problem_of(BIASED, (m, 32, 64)) for m in TIMES]


@pytest.fixture(scope="module")
def measured(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("by-m")
    directory.chmod(0o755)
    built = tuning_bench.build(problems(), directory / "built", kernel_cache)
    return write_measured(built, directory / "measured" / "by-m.nvgemm", TIMES)


@pytest.fixture
def default_mode(inductor: InductorSession, counted_anew: None) -> Iterator[InductorSession]:
    """No max-autotune, C++, and one compilation for all sizes."""
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    config = torch._inductor.config
    with (
        config.patch(max_autotune=False, max_autotune_gemm=False, cpp_wrapper=True),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        yield inductor


def compile_dynamic(session: InductorSession, **options: Any) -> Compiled:
    a, b = operands(16)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = session.compile(torch.mm, a, b, dynamic=None, **options)
    torch.testing.assert_close(compiled.result, a @ b)
    return compiled


def launched_at(session: InductorSession, compiled: Compiled, m: int) -> tuple[str, ...]:
    a, b = operands(m)
    torch.testing.assert_close(compiled.function(a, b), a @ b)
    return session.launched(compiled.function, a, b)


def only(operator: str | None) -> tuple[str, ...]:
    return () if operator is None else (operator,)


def test_quotes_in_an_origin_do_not_end_the_text() -> None:
    table = thresholds.DispatchTable(bounds=(8,), kernels=(thresholds.ATEN, "a" * 64))
    code = cpp.table_declaration("by_m", table, {"a" * 64: 'a"b\\c'})
    assert f'{{"{"a" * 64}", "a\\"b\\\\c"}}' in code


OTHER_CPP = {
    "aot_inductor.cross_target_platform": ("windows", "C++ for windows does not call"),
    "aot_inductor_mode.compile_standalone": (True, "standalone has no torch"),
}
"""By Inductor's setting: a value, and what is said."""


@pytest.mark.parametrize(
    "setting", [one for one in OTHER_CPP if one in torch._inductor.config.get_config_copy()]
)
def test_kinds_of_cpp_that_call_no_kernels_are_a_stated_miss(
    inductor: InductorSession, setting: str
) -> None:
    from nvgemm_runtime.inductor.autotuning.obstacles import cpp_obstacle

    value, why = OTHER_CPP[setting]

    config = torch._inductor.config
    with config.patch({setting: value, "cpp_wrapper": True}):
        said = cpp_obstacle("mm")
    assert said is not None
    assert why in said
    with config.patch({setting: value}):
        assert cpp_obstacle("mm") is None
    with config.patch(cpp_wrapper=True):
        assert cpp_obstacle("mm") is None


@pytest.mark.slow
def test_one_graph_uses_the_best_kernel_at_each_size(
    default_mode: InductorSession,
    measured: Path,
    timed: list[str],
    events: Callable[[], list[dict[str, Any]]],
) -> None:
    """At each side of each bound; unaligned operands, and threads, at different sizes."""
    default_mode.use(measured)
    compiled = compile_dynamic(default_mode)
    for _ in range(2):
        for m, operator in COMPUTED_BY.items():
            assert launched_at(default_mode, compiled, m) == only(operator), m
    code = "\n".join(compiled.code)
    assert "Table<4, 2> nvgemm_mm_by_m_" in code
    assert code.count("nvgemm_aot::gemm_by_rows(") == 1
    assert code.count("aoti_torch_cpu_mm_out(") == 1

    assert timed == []
    assert sum(nvgemm_runtime.stats().won.values()) == 2
    met, used = events()
    told = "ATen, from m 8 Cpu_8x32, from m 13 ATen, from m 16 Cpu_16x16, from m 25 ATen"
    assert met["measured"] == f"dispatched by m: {told}"
    assert used["name"] in met["offered"]
    assert len(used["kernels"]) == 2

    a, b = operands(20)
    unaligned = torch.empty(20 * 64 + 1)[1:].view(20, 64).copy_(a)
    for one, launched in ((unaligned, ()), (a, (SQUARE,)), (unaligned, ()), (a, (SQUARE,))):
        torch.testing.assert_close(compiled.function(one, b), a @ b)
        assert default_mode.launched(compiled.function, one, b) == launched

    assert_right_from_threads(default_mode, compiled.function)


@pytest.mark.slow
def test_kernels_that_fail_leave_their_rows_to_aten(
    default_mode: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is launched once, when its rows come up first."""
    tmp_path.chmod(0o755)
    declared = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    raising = recording_kernels.Raising()
    built = tuning_bench.build(declared, tmp_path / "built", kernel_cache, raising)
    default_mode.use(write_measured(built, tmp_path / "m" / "raising.nvgemm", TIMES))
    compiled = compile_dynamic(default_mode)
    assert compiled.launched == (), "it was launched at the first call"
    a, b = operands(8)
    assert default_mode.launched(compiled.function, a, b) == (WIDE,)
    for m in COMPUTED_BY:
        assert launched_at(default_mode, compiled, m) == ()
    (said,) = warnings_of(caplog)
    assert "NVGEMM_AOT_BUNDLES" in said
    assert "out of patience" in said
    failed = nvgemm_runtime.stats().failed.values()
    assert sum("out of patience" in reason for reason in failed) >= 2


@pytest.mark.slow
def test_a_batch(default_mode: InductorSession, kernel_cache: Cache, tmp_path: Path) -> None:
    """The rows are those of each matrix."""
    tmp_path.chmod(0o755)
    declared = [cpu_provider.problem(op=Op.BMM, sizes=(m, 32, 64)) for m in TIMES]
    built = tuning_bench.build(declared, tmp_path / "built", kernel_cache)
    default_mode.use(write_measured(built, tmp_path / "m" / "batch.nvgemm", TIMES))
    a, b = torch.randn(3, 16, 64), torch.randn(3, 64, 32)
    torch._dynamo.mark_dynamic(a, 1)
    compiled = default_mode.compile(torch.bmm, a, b, dynamic=None)
    for m, operator in COMPUTED_BY.items():
        a = torch.randn(3, m, 64)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        assert default_mode.launched(compiled.function, a, b) == only(operator), m


def assert_passes_required(
    session: InductorSession, function: Callable[..., Tensor], *arguments: Tensor
) -> None:
    """No kernel is used, and that is no error, but of torch 2.11, which lacks the operator."""
    options = {"nvgemm_aot_mode": "required"}
    try:
        compiled = session.compile(function, *arguments, dynamic=False, options=options)
    except torch._inductor.exc.InductorError as error:
        if "aoti_torch_cpu__grouped_mm" not in str(error):
            raise
    else:
        assert compiled.launched == ()


@pytest.mark.slow
@pytest.mark.parametrize("is_required", [False, True])
def test_groups_are_a_stated_miss_for_stock_torch_has_no_out_form(
    default_mode: InductorSession, kernel_cache: Cache, tmp_path: Path, is_required: bool
) -> None:
    tmp_path.chmod(0o755)
    served = cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16)
    declared = [cpu_provider.problem_of(served, (m, 32, 64)) for m in TIMES]
    built = tuning_bench.build(declared, tmp_path / "built", kernel_cache)
    default_mode.use(write_measured(built, tmp_path / "m" / "groups.nvgemm", TIMES))
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(4, 32, 64).bfloat16().mT
    ends = torch.tensor([2, 4, 6, 16], dtype=torch.int32)
    torch._dynamo.mark_dynamic(a, 0)

    def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=ends)

    why = "generated C\\+\\+ cannot call ATen's _grouped_mm with an existing tensor as its result"
    if is_required:
        few, first = torch.randn(20, 64).bfloat16(), torch.tensor([2, 4, 6, 20], dtype=torch.int32)
        assert_passes_required(default_mode, grouped, few, b, first)  # nobody declared m = 20
        with pytest.raises(Exception, match=why):
            default_mode.compile(
                grouped, a, b, ends, dynamic=None, options={"nvgemm_aot_mode": "required"}
            )
        return
    try:
        compiled = default_mode.compile(grouped, a, b, ends, dynamic=None)
    except torch._inductor.exc.InductorError as error:
        if "aoti_torch_cpu__grouped_mm" not in str(error):  # torch 2.11 calls it and lacks it
            raise
    else:
        torch.testing.assert_close(compiled.result, grouped(a, b, ends), rtol=2e-2, atol=2e-2)
        assert compiled.launched == ()
    (said,) = nvgemm_runtime.stats().misses
    assert said == why.replace("\\", "")


class Model(torch.nn.Module):
    """A product in fp32, something behind it that is fused, and a Linear in bf16."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(64 * 32.0)
        self.matrix = torch.nn.Parameter(whole.view(64, 32) % 7, requires_grad=False)
        self.linear = torch.nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
        self.linear.weight.copy_(whole.view(32, 64) % 2)
        self.linear.bias.copy_(whole[:32] % 3)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(a @ self.matrix), self.linear(a.bfloat16())


def whole_numbers(m: int) -> Tensor:
    """Every sum is exact, whoever computes it."""
    return torch.arange(m * 64.0).view(m, 64) % 5 % 3 - 1


HERE = Path(__file__).parent

FIRST_LINES = f"""
import sys
sys.path[:0] = {[str(HERE), str(Path(cpu_kernels.__file__).parent)]!r}
from test_dispatched_cpp import Model, whole_numbers
"""

MAKE = (
    FIRST_LINES
    + """
m = torch.export.Dim("m", min=2, max=512)
program = torch.export.export(Model(), (whole_numbers(16),), dynamic_shapes={{"a": {{0: m}}}})
torch._inductor.aoti_compile_and_package(program, package_path={path!r})
"""
)

RUN = (
    FIRST_LINES
    + """
model = torch._inductor.aoti_load_package({path!r})
stock = Model()
os.truncate(os.environ["TEST_RECORD"], 0)
for m in {sizes!r}:
    right.append(all(map(torch.equal, model(whole_numbers(m)), stock(whole_numbers(m)))))
"""
)

RUN_ARCHIVE = RUN.replace(
    "torch._inductor.aoti_load_package({path!r})",
    "load_pt2({path!r}).aoti_runners['model']",
).replace("model =", "from torch.export.pt2_archive._package import load_pt2\nmodel =")
"""Loads the package as an archive, without Inductor's module of packages."""

CALL_ONCE = (
    FIRST_LINES
    + """
torch._inductor.aoti_load_package({path!r})(whole_numbers(100))
from nvgemm_runtime.launch.compiled import named_kernels
from nvgemm_runtime.launch.loading.loader import LOADER
right += [LOADER.get(kernel) is not None for kernel in named_kernels()]
"""
)

SIZES = (16, 8, 7, 12, 13, 24, 25, 16)

LAUNCHED = [SQUARE, SQUARE, WIDE, WIDE, WIDE, WIDE, SQUARE, SQUARE, SQUARE, SQUARE]
"""By the two GEMMs of the package at `SIZES`."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


def without_kernel(measured: Path, operator: str, output: Path) -> Path:
    """The bundle with damaged payloads of an operator."""
    with Bundle(measured) as bundle:
        spans = [one.span for one in bundle.header.kernels if one.operator == operator]
    content = bytearray(measured.read_bytes())
    for span in spans:
        content[span.offset + span.stored_bytes // 2] ^= 0xFF
    output.write_bytes(content)
    return output


@pytest.fixture(scope="module")
def package(measured: Path, home: Home, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """A package that is made in one process and loaded in others."""
    path = str(home.directory / "model.pt2")
    bundles = {"NVGEMM_AOT_BUNDLES": str(measured)}
    made = home.run(compiles=False, after=MAKE.format(path=path), variables=bundles)
    directory = tmp_path_factory.mktemp("damaged")
    directory.chmod(0o755)
    damaged = without_kernel(measured, WIDE, directory / "damaged.nvgemm")
    run = RUN.format(path=path, sizes=SIZES)
    loads = {
        "with bundles": (run, bundles),
        "as an archive": (RUN_ARCHIVE.format(path=path, sizes=SIZES), bundles),
        "called once": (CALL_ONCE.format(path=path), bundles),
        "without kernels": ("import nvgemm_runtime\nnvgemm_runtime.load_operators()\n" + run, {}),
        "damaged": (run, {"NVGEMM_AOT_BUNDLES": str(damaged)}),
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(home.run, compiles=False, after=after, variables=variables)
            for name, (after, variables) in loads.items()
        }
        return {"made": made, **{name: run.result() for name, run in runs.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["with bundles", "as an archive"])
def test_a_package_chooses_by_m_where_kernels_are_installed(
    package: dict[str, Ran], loaded: str
) -> None:
    ran = package[loaded]
    assert ran.right == [True] * len(SIZES)
    assert ran.launched == LAUNCHED
    assert "warning" not in ran.said.lower()
    assert not any(name.startswith("torch._inductor.select") for name in ran.at_end)
    has_packages = "torch._inductor.package.package" in ran.at_end
    assert has_packages == (loaded == "with bundles")


@pytest.mark.slow
def test_the_first_call_loads_the_kernels_of_all_sizes(package: dict[str, Ran]) -> None:
    """Though ATen computes its own. From then on they are known to `preload`."""
    ran = package["called once"]
    assert ran.right == [True] * 4, "two kernels of each of the two tables"
    assert ran.launched == []


@pytest.mark.slow
def test_a_package_says_once_which_wheel_is_missing(package: dict[str, Ran]) -> None:
    ran = package["without kernels"]
    assert ran.right == [True] * len(SIZES)
    assert ran.launched == []
    assert ran.count("a compiled graph runs GEMMs on ATen instead of the kernels of") == 1


@pytest.mark.slow
def test_a_kernel_that_cannot_be_loaded_in_the_middle_of_a_run_costs_its_rows_alone(
    package: dict[str, Ran],
) -> None:
    ran = package["damaged"]
    assert ran.right == [True] * len(SIZES)
    assert ran.launched == [name for name in LAUNCHED if name == SQUARE]
    warned = ran.count("a compiled graph runs GEMMs on ATen instead of the kernels of")
    assert warned == 2, ran.said  # each kernel has a reason of its own


IN_CPP = {"TORCHINDUCTOR_CPP_WRAPPER": "1"}


@pytest.fixture(scope="module")
def site(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a wheel of measured kernels for the program of `fresh_processes` is installed."""
    directory = tmp_path_factory.mktemp("wheels")
    declared = [
        cpu_provider.problem(layout, sizes=(m, 32, 64)) for layout in ("tt", "tn") for m in TIMES
    ]
    built = tuning_bench.build(declared, directory / "built", kernel_cache)
    wheel = write_measured(built, directory / "measured" / built.name, TIMES)
    return pip_install(wheel, "1.0", directory / "site")


@pytest.mark.slow
def test_warm_caches_and_a_wheel_that_is_removed(
    site: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The program's second call has 8 rows."""
    home = Home(tmp_path_factory.mktemp("cached"))
    cold = home.run(site, plain=True, variables=IN_CPP)
    assert cold.right == [True, True]
    assert (cold.hits, cold.misses) == (0, 1)
    assert cold.launched == [WIDE, WIDE]
    warm = home.run(site, plain=True, variables=IN_CPP)
    assert warm.right == [True, True]
    assert (warm.hits, warm.misses) == (1, 0)
    assert warm.launched == [WIDE, WIDE]
    assert warm.count("nvgemm") == 0
    removed = home.run(plain=True, variables=IN_CPP)
    assert removed.right == [True, True]
    assert (removed.hits, removed.misses) == (0, 1)
    assert removed.launched == []


@pytest.mark.slow
def test_code_made_for_other_operators_does_not_decide_for_the_rest(tmp_path: Path) -> None:
    """Packages of several releases in one process: each asks for the number it was made for."""
    native.load()

    def build(number: int) -> Callable[[], bool]:
        """What code made for a number finds."""
        source, library = tmp_path / f"made_for_{number}.cpp", tmp_path / f"made_for_{number}.so"
        asks = f"{cpp.CALLED_ABI};"
        assert cpp.HEADER.count(asks) == 1
        there = 'extern "C" bool there() { return nvgemm_aot::has_operators(); }'
        inductors = "#include <torch/csrc/inductor/aoti_runtime/utils.h>\n"
        source.write_text(inductors + cpp.HEADER.replace(asks, f"{number};") + there)
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        command = ["g++", "-std=c++20", "-shared", "-fPIC", *includes, source, "-o", library]
        subprocess.run([*map(str, command)], check=True)
        found = ctypes.CDLL(str(library), mode=os.RTLD_LAZY).there
        found.restype = ctypes.c_bool
        return found

    other, same = build(cpp.CALLED_ABI + 1), build(cpp.CALLED_ABI)
    assert not other()
    assert same()
