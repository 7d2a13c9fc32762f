"""Quack's kernels, each compiled once: what `verify` says of them and what launchers take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quack_kernels
from fake_driver import FakeDriver, fake_driver
from launcher_scripts import PRELUDE, REACHES_CUDA
from nvgemm_aot.pipeline.compiler import Task, compile_all
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.verify.bundle import Report, verify_bundle
from nvgemm_runtime.bundle.reader import Bundle
from quack_kernels import KERNELS

pytestmark = pytest.mark.slow  # compiles some 80 kernels


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return quack_kernels.make_all_tasks()


@pytest.fixture(scope="module")
def bundles(
    tasks: list[Task], kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The bundle of each architecture. A kernel that spills registers does not compile."""
    return quack_kernels.compile_bundles(tasks, kernel_cache, tmp_path_factory.mktemp("quack"))


@pytest.fixture(scope="module")
def reports(bundles: dict[str, Path]) -> dict[str, Report]:
    return {arch: verify_bundle(path, disassemble=True) for arch, path in bundles.items()}


@pytest.mark.parametrize("arch", KERNELS)
def test_verify_finds_nothing(reports: dict[str, Report], arch: str) -> None:
    assert not reports[arch].findings
    assert reports[arch].ok


@pytest.mark.parametrize("arch", KERNELS)
def test_operands_are_those_of_the_calling_convention(
    bundles: dict[str, Path], reports: dict[str, Report], arch: str
) -> None:
    operands = {one.id: one.operands or "" for one in reports[arch].kernels}
    with Bundle(bundles[arch]) as bundle:
        for kernel in bundle.header.kernels:
            has_memory = "workspace: Tensor([n" in operands[kernel.id]
            assert has_memory == (kernel.workspace is not None), kernel.operator
            has_clusters = "clusters: int32, stream: Stream" in operands[kernel.id]
            assert has_clusters == (arch == "sm_90a"), kernel.operator


AGAIN = (
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias",
    "k_grouped_mm/nt/bf16xbf16/fp32/bf16",
    "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_oai_halves_gradient_sums",
    "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_ups",
    "gathered_grouped_mm/tt/bf16xbf16/fp32/bf16/swiglu_oai_interleaved_kept",
)
"""A signature of each of the project's own classes; the last kernel of each is compiled again."""


@pytest.mark.usefixtures("bundles")
def test_code_is_the_same_in_another_process_and_another_order(
    tasks: list[Task], kernel_cache: Cache, tmp_path: Path
) -> None:
    some = {
        (task.target.target.arch, task.candidate.signature.key): task
        for task in tasks
        if task.candidate.signature.key in AGAIN
        and task.target.target.arch in ("sm_90a", "sm_100f")
    }
    assert len(some) >= len(AGAIN) + 4
    fresh = Cache(tmp_path / "fresh")
    assert compile_all([*some.values()][::-1], fresh, jobs=1).compiled == len(some)
    for task in some.values():
        assert fresh.get(task.key) == kernel_cache.get(task.key) is not None, task.candidate


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    with fake_driver(tmp_path_factory.mktemp("driver")) as driver:
        yield driver


CALL_ALL = """
from pathlib import Path
from nvgemm_runtime.gemm.epilogues import GateForm
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import extra_roles

def call(kernel):
    launch = library.load(bundle, kernel).launch
    for m in (1, 3, 128) if kernel.signature.layout.a_row_major else (16, 128):
        say(kernel, launch, *tensors(kernel.signature, m))
    if kernel.signature.form is GateForm.JOINED and kernel.signature.op is Op.MM:
        a, b, out, *extras = tensors(kernel.signature, 128)
        assert out.shape == (128, b.shape[1] // 2)
        print("WRONG ", end="")
        say(kernel, launch, a, b, on(torch.empty(128, b.shape[1]).bfloat16()), *extras)

def call_with_memory(kernel):
    # The launch API asks torch for memory of a GPU, so the kernel's own function is called.
    library.load(bundle, kernel)  # with the libraries that it needs
    file = Path(sys.argv[1]).with_name(f"{kernel.id}.so")
    file.write_bytes(bundle.payload(kernel))
    function = tvm_ffi.load_module(str(file)).gemm
    parameters = parse_calling_convention(kernel.calling_convention).parameters
    extras = [role.value for role in extra_roles(kernel.signature)]
    given = dict(zip(("a", "b", "out", *extras), tensors(kernel.signature, 16)))
    given |= {"clusters": 132, "stream": ctypes.c_void_p(0)}
    for dtype in (torch.uint8, torch.int32):
        given["workspace"] = on(torch.zeros(1 << 16, dtype=dtype))
        print("" if dtype is torch.uint8 else "WRONG workspace ", end="")
        say(kernel, function, *(given[name] for name in parameters))

for kernel in bundle.header.kernels:
    (call if kernel.workspace is None else call_with_memory)(kernel)
"""


@pytest.mark.parametrize(("arch", "capability"), [("sm_90a", 90), ("sm_100f", 100)])
def test_launchers_take_what_the_runtime_passes(
    driver: FakeDriver, bundles: dict[str, Path], arch: str, capability: int
) -> None:
    """In its order: of the calls that are wrong, none gets as far as CUDA."""
    path = bundles[arch]
    said = driver.run(PRELUDE + CALL_ALL, str(path), capability=capability).splitlines()
    wrong = [line for line in said if line.startswith("WRONG ")]
    for line in said:
        assert (REACHES_CUDA in line) == (line not in wrong), line
        if line in wrong:
            shapes = "must be (m, k), (k, n) and (m, n / 2)"
            assert ("workspace" if line.startswith("WRONG workspace") else shapes) in line, line
    with Bundle(path) as bundle:
        kernels = bundle.header.kernels
    assert len(said) - len(wrong) >= 2 * len(kernels) - sum(
        kernel.workspace is not None for kernel in kernels
    )
    assert len(wrong) >= sum(kernel.workspace is not None for kernel in kernels) > 1
