"""A provider whose kernels are GEMMs for the CPU, so that everything behind it runs for real.

Its kernels go through the builder, the bundle, the loader and the launcher of the product. It is
part of the tests alone: kernels for the CPU serve nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import cpu_kernels
from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.pipeline import compiler, pipeline
from nvgemm_aot.pipeline.compiler import Task, TaskResult
from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_aot.pipeline.pipeline import BuiltBundle, build
from nvgemm_aot.providers import Candidate, Enumeration, Rejection
from nvgemm_aot.providers.base import INTERFACE_VERSION, BlockShape
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import BuildTarget
from nvgemm_aot.targets.local import CPU_PROFILE
from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.errors import CompileError
from nvgemm_runtime.gemm.epilogues import ADD, ALL_EPILOGUES, BIAS, Epilogue, GateForm
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem, Signature
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.gemm.types import ScaleRecipe

ALIGNED_BYTES = 16
"""What the larger tiles demand, as kernels for GPUs do; the smallest takes anything."""

TILES = {"Cpu_16x16": (16, 16), "Cpu_8x32": (8, 32), "Cpu_1x1": (1, 1)}
"""Operators and their tiles (m, n)."""

_FLAGS = ("-std=c99", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-stack-protector", "-Wall")

TARGET = BuildTarget(target=Target(arch="cpu"), device=CPU_PROFILE)

SIGNATURES = tuple(
    cpu_kernels.signature(layout.value, op=op, operand=operand)
    for op in (Op.MM, Op.BMM)
    for operand in (DType.FP32, DType.FP16, DType.BF16, DType.INT8)
    for layout in Layout
)
"""Plain GEMMs: both operations, four types, all layouts."""

FUSED = (
    *(
        cpu_kernels.signature("tn", op=op, operand=operand, epilogue=epilogue)
        for op in (Op.MM, Op.BMM)
        for operand in (DType.FP16, DType.BF16)
        for epilogue in ALL_EPILOGUES
        if epilogue.gate is None or (op is Op.MM and epilogue.form is GateForm.JOINED)
    ),
    *(
        cpu_kernels.signature("tn", operand=DType.FP8_E4M3, scales=scales, epilogue=epilogue)
        for scales in (ScaleRecipe.FP32_TENSOR, ScaleRecipe.FP32_ROW)
        for epilogue in (None, BIAS)
    ),
    *(
        cpu_kernels.signature("tn", operand=operand, scales=scales)
        for operand, scales in (
            (DType.FP8_E4M3, ScaleRecipe.E8M0_1X32),
            (DType.FP8_E5M2, ScaleRecipe.E8M0_1X32),
            (DType.FP4_E2M1, ScaleRecipe.E8M0_1X32),
            (DType.FP4_E2M1, ScaleRecipe.E4M3_1X16),
            (DType.FP4_E2M1, ScaleRecipe.E8M0_1X16),
        )
    ),
    *(
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=operand)
        for operand in (DType.FP16, DType.BF16, DType.FP8_E4M3)
    ),
    *(
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)
        for epilogue in ALL_EPILOGUES
        if epilogue in (BIAS, ADD) or (epilogue.form is not None and not epilogue.form.row.has_sums)
    ),
    *(
        cpu_kernels.signature("tt", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=epilogue)
        for epilogue in ALL_EPILOGUES
        if epilogue is ADD or epilogue.reads_addend
    ),
    *(
        cpu_kernels.signature("nt", op=Op.K_GROUPED_MM, operand=operand)
        for operand in (DType.FP16, DType.BF16)
    ),
    *(
        cpu_kernels.signature("tn", op=Op.GATHERED_GROUPED_MM, operand=operand)
        for operand in (DType.FP16, DType.BF16)
    ),
    *(
        cpu_kernels.signature("tn", op=Op.GATHERED_GROUPED_MM, operand=DType.BF16, epilogue=one)
        for one in (
            BIAS,
            Epilogue.parse("swiglu_halves"),
            Epilogue.parse("swiglu_oai_interleaved_kept"),
            Epilogue.parse("swiglu_halves_ups"),
        )
    ),
    *(
        cpu_kernels.signature("tt", op=Op.GATHERED_MM, operand=operand)
        for operand in (DType.FP16, DType.BF16)
    ),
)
"""GEMMs that take more than A and B: some of what `cpu_kernels.computes`."""


class CpuModel:
    """Estimates by counting: the products of whole tiles, and a fee for each tile."""

    name = "counting 1"

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        tile_m, tile_n, _ = shape.tile
        tiles = -(-problem.m // tile_m) * -(-problem.n // tile_n) * problem.batch
        return tiles * (tile_m * tile_n * problem.k + 50)


class CpuProvider:
    """Offers `TILES` for every signature that `cpu_kernels.computes`."""

    name = "cpu_provider:CpuProvider"
    interface = INTERFACE_VERSION
    recipe = "2"
    operators: tuple[str, ...] = tuple(TILES)
    workspace_bytes = 0
    workspace: TileWorkspace | None = None
    is_deterministic = True

    def toolchain(self) -> dict[str, str]:
        return {"cc": _compiler_version()}

    def prepare(self) -> None:
        pass

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        if target.target.arch != "cpu" or not cpu_kernels.computes(signature):
            reason = f"computes nothing like {signature.key} on {target.target.arch}"
            return Enumeration(
                candidates=(), rejections=tuple(Rejection(operator=o, reason=reason) for o in TILES)
            )
        return Enumeration(
            candidates=tuple(self._candidate(name, signature) for name in self.operators),
            rejections=(),
        )

    def runtime_model(self, target: BuildTarget) -> CpuModel:
        return CpuModel()

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        text = cpu_kernels.source(
            candidate.signature,
            self.behaviour_of(candidate) + demand_layout(candidate.signature),
            TILES[candidate.operator],
            candidate.workspace_bytes,
            candidate.workspace,
        )
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "kernel.c").write_text(text)
            command = [*c_compiler(), *_FLAGS, "-c", "-o", "kernel.o", "kernel.c"]
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise CompileError(f"{candidate.operator}: {done.stderr}")
            return (Path(directory) / "kernel.o").read_bytes()

    def behaviour_of(self, candidate: Candidate) -> str:
        """C that a kernel runs first."""
        return ""

    def _candidate(self, operator: str, signature: Signature) -> Candidate:
        tile = (*TILES[operator], 1)
        return Candidate(
            provider=self.name,
            operator=operator,
            signature=signature,
            calling_convention=cpu_kernels.convention(
                signature, self.workspace_bytes > 0 or self.workspace is not None
            ),
            design=KernelDesign(
                tile=tile,
                ctas_per_tile=1,
                cluster=(1, 1),
                fallback_cluster=None,
                scheduler="one_tile",
            ),
            cluster_sizes=(),
            block_shape=BlockShape(tile=tile, cluster=(1, 1)),
            preference=0,
            alignment_bytes=1 if operator == "Cpu_1x1" else ALIGNED_BYTES,
            workspace_bytes=self.workspace_bytes,
            workspace=self.workspace,
            is_deterministic=self.is_deterministic,
        )


class TwoTiles(CpuProvider):
    """One that demands aligned operands, and one that takes any: quicker to compile."""

    name = "cpu_provider:TwoTiles"
    operators = ("Cpu_16x16", "Cpu_1x1")


class WithWorkspace(CpuProvider):
    """Kernels that keep every sum in their workspace for a while."""

    name = "cpu_provider:WithWorkspace"
    workspace_bytes = 4096


class WithCounters(CpuProvider):
    """Kernels that refuse a workspace of another size than theirs, or counters that are not zero.

    They leave it full of ones, as a launch that is killed may.
    """

    name = "cpu_provider:WithCounters"
    workspace = TileWorkspace(
        tile=(8, 16), tiles_multiple=(2, 1), zeroed_once=4, zeroed_per_tile=4, scratch_per_tile=512
    )


class TimingDependent(CpuProvider):
    """Kernels that say that their results depend on timing."""

    name = "cpu_provider:TimingDependent"
    is_deterministic = False

    def behaviour_of(self, candidate: Candidate) -> str:
        """Something to tell them by: an entry belongs to a payload."""
        return "static volatile int arrivals; ++arrivals;\n"


@functools.cache
def _compiler_version() -> str:
    done = subprocess.run([*c_compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def demand_layout(signature: Signature) -> str:
    """C that refuses other layouts than the signature's, as a compiled kernel would get wrong."""
    if signature.scales is not None and signature.scales.is_swizzled:
        return ""  # the kernel gets addresses alone
    checks = [
        f"if ({name}->strides[{name}->ndim - {1 if row_major else 2}] != 1) "
        f'return raise("ValueError", "{name} has another layout than {signature.key}");'
        for name, row_major in (
            ("a", signature.layout.a_row_major),
            ("b", signature.layout.b_row_major),
            ("out", True),
        )
    ]
    return "\n".join(checks)


def manifest(
    problems: Iterable[Problem], *, name: str = "cpu", candidates: int = len(TILES)
) -> Manifest:
    """What a manifest would declare, if manifests could name the CPU."""
    return Manifest(
        name=name,
        description="",
        targets=(TARGET,),
        declared=tuple(Declared(problem=p, candidates=candidates) for p in sorted(problems)),
    )


class _InThisProcess:
    """Stands in for compiler processes: to start them takes longer than a C compiler's work."""

    def __init__(self, cache: Cache, *_: object) -> None:
        self._cache = cache

    def __enter__(self) -> _InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, items: Sequence[Task], /) -> Iterator[tuple[Task, TaskResult]]:
        for task in items:
            yield task, compiler._run_task(task, self._cache.directory)


@contextlib.contextmanager
def compiling_here() -> Iterator[None]:
    """Have builds compile in this process, which no kernel may end."""
    with (
        mock.patch.object(compiler, "ProviderWorkers", _InThisProcess),
        mock.patch.object(pipeline, "ProviderWorkers", _InThisProcess),
    ):
        yield


def build_here(
    declared: Manifest, directory: Path, cache: Cache, provider: CpuProvider
) -> BuiltBundle:
    """Build a manifest's only bundle by the product's own pipeline, without other processes."""
    with compiling_here():
        return build(declared, directory, cache, jobs=1, provider=provider).bundles[0]


def build_bundle(
    problems: Iterable[Problem],
    directory: Path,
    cache: Cache,
    *,
    name: str = "cpu",
    candidates: int = len(TILES),
    provider: CpuProvider | None = None,
) -> BuiltBundle:
    """Build the bundle of some problems by the product's own pipeline."""
    declared = manifest(problems, name=name, candidates=candidates)
    return build_here(declared, directory, cache, provider or CpuProvider())


def problem(
    layout: str = "tt",
    *,
    op: Op = Op.MM,
    operand: DType = DType.FP32,
    sizes: tuple[int, int, int] = (16, 32, 64),
) -> Problem:
    """A plain problem; see `problem_of`."""
    return problem_of(cpu_kernels.signature(layout, op=op, operand=operand), sizes)


def problem_of(served: Signature, sizes: tuple[int, int, int] = (16, 32, 64)) -> Problem:
    """A problem of given sizes (m, n, k): three times of them for ``bmm``, four groups else."""
    m, n, k = sizes
    return Problem(
        signature=served,
        m=m,
        n=n,
        k=k,
        batch=3 if served.op is Op.BMM else 1,
        groups=4 if served.op.has_groups else 1,
    )
