"""What several test files share: real kernels, compiled once a session, and the launcher."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import hypothesis
import pytest
import torch

import cpu_kernels
import cpu_provider
import recording_kernels
import tuning_bench
from cpu_kernels import Register
from foreign_packages import BuiltPackage
from inductor_session import InductorSession
from jit_programs import JitMachine
from nvgemm_aot.emulator.checking import manifest_tasks
from nvgemm_aot.emulator.checking.kernel_check import KernelTask
from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import BuildResult, BuiltBundle, build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.locks import locked
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.jit.client import JitClient
from nvgemm_runtime.launch.loading import native
from recording_kernels import Record
from tuning_bench import DictatedTimer

# One thread a process: the tests run in as many processes as there are cores, and threads that wait
# for each other on a busy core take twice the time of the same work in one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# The vector instructions of this processor need not be tried out: that takes every fresh process
# several seconds of a C++ compiler.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# An example takes as long as the machine lets it; by default more than 0.2 s is a failure.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


def pytest_make_parametrize_id(val: object) -> str | None:
    return val.name if isinstance(val, Epilogue) else None


REAL_MANIFEST = """
version: 1
name: real
targets: [sm_100f, {arch: sm_90a, device: H200}]
providers: [cutlass_operators]
candidates: 2
gemms:
  - {dtype: bf16, mnk: [[8, 4096, 4096]]}
  - {dtype: fp16, layout: nt, op: bmm, batch: 4, mnk: [[2048, 2048, 512]], candidates: 1}
"""
"""Two kernels for each bf16 problem (TGV and a narrow tile on sm_100f) and one for each fp16."""


_LONG = ("whole/test_quack_kernels.py", "whole/test_engines.py", "runtime/inductor", "whole")
"""What takes longest, first: begun last, one of these files would keep a single process busy."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist begins with the most tests
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is collected, a million objects, out of the garbage collector's way."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with `_LONG`."""
    long = [Path(__file__).parent / one for one in _LONG]

    def place(item: pytest.Item) -> int:
        return next((i for i, one in enumerate(long) if item.path.is_relative_to(one)), len(long))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this user has compiled or confirmed is not found by tests, nor theirs by the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVGEMM_AOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path_factory.mktemp("confirmed") / "none"))
        yield


@pytest.fixture(scope="session")
def built_package(tmp_path_factory: pytest.TempPathFactory) -> BuiltPackage:
    """The kernels of tests/provider_package, built by the command."""
    return BuiltPackage(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """The build cache of the session: what one test compiled, no other compiles again.

    Processes that share a session's tests have directories beside each other, and share this. So do
    sessions for which ``TEST_KERNELS`` names a directory.
    """
    return Cache(_shared_directory(tmp_path_factory) / "kernel-cache")


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AbstractContextManager[None]]:
    """While entered, no other process of the session builds the bundles that all share.

    Who comes second finds every kernel in the cache, instead of compiling the same at once.
    """
    return functools.partial(locked, _shared_directory(tmp_path_factory) / "kernel-cache.lock")


def _shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the session, which all of its processes have."""
    if named := os.environ.get("TEST_KERNELS"):
        return Path(named)
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if "PYTEST_XDIST_WORKER" in os.environ else directory


@pytest.fixture(scope="session")
def real_build(
    kernel_cache: Cache,
    alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> BuildResult:
    """Bundles of six real kernels, three a target, from the whole pipeline."""
    directory = tmp_path_factory.mktemp("real")
    (directory / "real.yaml").write_text(REAL_MANIFEST)
    with alone():
        return build(load_manifest(directory / "real.yaml"), directory / "out", kernel_cache)


@pytest.fixture(scope="session")
def emulated_kernel(
    real_build: BuildResult,
    kernel_cache: Cache,
    alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> KernelTask:
    """The persistent bf16 kernel for sm_100f in `real_build`, compiled again for its PTX."""
    manifest = tmp_path_factory.mktemp("emulated") / "emulated.yaml"
    bf16 = [line for line in REAL_MANIFEST.splitlines() if "fp16" not in line]
    manifest.write_text("\n".join(bf16).replace(", {arch: sm_90a, device: H200}", ""))
    planned = manifest_tasks.manifest_kernels(manifest, kernel_cache)
    (one,) = (one for one in planned if one.task.candidate.design.scheduler != "one_tile")
    with alone():
        prepared = manifest_tasks.prepare([one], kernel_cache, jobs=1, seeds=(0,))
    assert prepared.failures == ()
    return prepared.tasks[0]


@pytest.fixture(scope="session")
def real_bundles(real_build: BuildResult) -> dict[str, Path]:
    """The bundle of each architecture."""
    return {bundle.header.target.arch: bundle.path for bundle in real_build.bundles}


@pytest.fixture(scope="session")
def cpu_bundle(
    kernel_cache: Cache,
    alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> BuiltBundle:
    """A bundle of kernels for the CPU: three for one problem of each signature."""
    problems = [cpu_provider.problem_of(served) for served in cpu_provider.SIGNATURES]
    with alone():
        return cpu_provider.build_bundle(problems, tmp_path_factory.mktemp("cpu"), kernel_cache)


@pytest.fixture(scope="session")
def fused_bundle(
    kernel_cache: Cache,
    alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> BuiltBundle:
    """A bundle of kernels for the CPU that take scales, offsets or something to add."""
    problems = [cpu_provider.problem_of(served) for served in cpu_provider.FUSED]
    with alone():
        return cpu_provider.build_bundle(
            problems, tmp_path_factory.mktemp("fused"), kernel_cache,
            provider=cpu_provider.TwoTiles(),
        )  # fmt: skip


@pytest.fixture(scope="session")
def recording_bundle(
    kernel_cache: Cache,
    alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> BuiltBundle:
    """A bundle of one recording kernel a signature, each of which demands 16 bytes."""
    problems = [
        cpu_provider.problem(layout, op=op, operand=operand)
        for op, operand in ((Op.MM, DType.FP32), (Op.BMM, DType.FP32), (Op.MM, DType.BF16))
        for layout in ("tt", "tn", "nt")
    ]
    directory = tmp_path_factory.mktemp("recording")
    with alone():
        return recording_kernels.build_recording(problems, directory, kernel_cache)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    """What recording kernels of this process write."""
    record = Record(tmp_path / "record")
    record.open_here()
    yield record
    record.close_here()


@pytest.fixture(scope="session")
def inductor_libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """C++ that Inductor compiled in one test is not compiled in another."""
    from inductor_libraries import share_libraries  # which imports Inductor

    directory = _shared_directory(tmp_path_factory) / f"inductor-{torch.__version__}"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        share_libraries(patch, directory)
        yield


@pytest.fixture
def inductor(
    recording_bundle: BuiltBundle,
    record: Record,
    inductor_libraries: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[InductorSession]:
    """``torch.compile`` with caches of its own, over ATen and the recording bundle alone."""
    session = InductorSession(record, monkeypatch)
    session.use(recording_bundle.path)
    with session.caches():
        yield session


@pytest.fixture(scope="session")
def lib() -> native.Native:
    """The native launcher."""
    return native.load()


@pytest.fixture(scope="session")
def register(lib: native.Native, tmp_path_factory: pytest.TempPathFactory) -> Register:
    """Compiles, loads and registers a kernel; returns its id and its handle."""
    directory = _shared_directory(tmp_path_factory) / "loaded-kernels"
    directory.mkdir(exist_ok=True)
    count = 0

    def register(
        served: Signature | None = None,
        behaviour: str = "",
        alignment: int = 4,
        workspace_bytes: int = 0,
        workspace: TileWorkspace | None = None,
    ) -> tuple[str, int]:
        nonlocal count
        count += 1  # an id of its own for each, whatever the source
        served = served or cpu_kernels.signature()
        kernel = cpu_kernels.load(
            served,
            directory,
            behaviour,
            workspace_bytes=workspace_bytes,
            workspace=workspace,
            number=count,
        )
        convention = parse_calling_convention(kernel.convention)
        assert convention is not None
        handle = lib.register_kernel(
            id=kernel.id,
            function_address=kernel.address,
            signature=served,
            alignment_bytes=alignment,
            target=None,
            workspace_bytes=workspace_bytes,
            workspace=workspace,
            convention=convention,
        )
        return kernel.id, handle

    return register


@pytest.fixture(scope="module")
def plain(register: Register) -> tuple[str, int]:
    """A kernel for row-major fp32 matrices that wants no more than their elements' alignment."""
    return register()


@pytest.fixture(scope="module")
def aligned(register: Register) -> tuple[str, int]:
    """A kernel for row-major fp32 that wants 16 bytes: multiples of 4 elements."""
    return register(alignment=16)


@pytest.fixture(scope="module")
def batched(register: Register) -> tuple[str, int]:
    """As ``aligned``, for batches."""
    return register(cpu_kernels.signature(op=Op.BMM), alignment=16)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JitMachine]:
    """A machine whose programs have kernels compiled, and leave no process behind."""
    machine = JitMachine(tmp_path, monkeypatch)
    with machine.ending_quietly():
        yield machine


@pytest.fixture
def fallback(machine: JitMachine) -> Iterator[JitClient]:
    """The requests of this process, as if it had just started."""
    fallback = JitClient()
    yield fallback
    fallback.close()


@pytest.fixture(scope="session")
def tunable(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to tune: three problems of one signature, three kernels for the CPU each."""
    return tuning_bench.build(
        tuning_bench.PROBLEMS, tmp_path_factory.mktemp("tunable"), kernel_cache
    )


@pytest.fixture
def tuned_path(tmp_path: Path) -> Path:
    """Where the tuned bundle goes."""
    return tmp_path / "tuned.nvgemm"


@pytest.fixture
def dictated(monkeypatch: pytest.MonkeyPatch) -> DictatedTimer:
    """A clock whose times a test dictates; the build's first kernel is the slowest."""
    timer = DictatedTimer(tuning_bench.SLOW_FIRST)
    timer.watch_runs(monkeypatch)
    return timer
