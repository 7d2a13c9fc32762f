"""Provider of NVIDIA's ``cutlass.operators``: CuTe-DSL GEMMs for Hopper and Blackwell.

Importing this module is cheap; the compiler is imported when a method first needs it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import CompileError, ToolchainError
from nvgemm_runtime.format import KernelDesign
from nvgemm_runtime.problem import DType, Op, Signature

from ..device import DeviceProfile
from ..heuristics import MatmulHeuristics
from ..runtime_model import BlockShape, RuntimeModel
from ..targets import BuildTarget
from .base import Candidate, Enumeration, Rejection

_log = logging.getLogger(__name__)

_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvidia-cutlass-operators",
    "apache-tvm-ffi",
)
"""Distributions whose versions shape the code."""

_COMPILER_VARIABLES = ("CUTE_DSL_", "CUTLASS_")
"""What the names of the environment variables begin with that the compiler reads."""

_ARCHITECTURE_VARIABLE, _ARCHITECTURE = "CUTE_DSL_ARCH", "sm_100a"
"""What the compiler takes itself for where no GPU is; each kernel is compiled for its own target.

Said beforehand, for it asks the driver otherwise: where all GPUs are hidden, over a hundred times,
which took 4 s a process on a machine with an H200, and 90 s where 16 did so at once.
"""

_FUNCTION_NAME = "gemm"

_HOST_CPU = "x86-64"
_HOST_FEATURES = "+sse2"
"""What every processor of the platform has. Left alone, the compiler writes host code for the
processor it runs on: kernels built where AVX-512 is would crash elsewhere."""

_SAMPLE_EXTENTS = {"batch": 2, "m": 256, "n": 512, "k": 1024}
"""Sizes of the arguments that operators are listed and compiled with. Kernels keep sizes symbolic,
so that any sizes give the same code; these only must be aligned and unlike each other."""

_SCHEDULERS = {
    "CLCDynamicPersistentTileSchedulerMetadata": "clc",
    "StaticPersistentTileSchedulerMetadata": "static_persistent",
}

_SM90_OPERATOR = "Sm90StaticPersistentGemmOperator"
_TGV_OPERATOR = "TgvGemmOperator"
_EFC_OPERATOR = "PersistentDenseGemmEFCOperator"


class CutlassOperators:
    """Lists and compiles the operators of ``cutlass.operators``."""

    name = "cutlass_operators"
    recipe = f"1, host {_HOST_CPU} {_HOST_FEATURES}"

    def toolchain(self) -> dict[str, str]:
        """Versions of the compiler's distributions; see `Provider.toolchain`."""
        try:
            return {name: version(name) for name in _DISTRIBUTIONS}
        except PackageNotFoundError as error:
            raise ToolchainError(
                f"cannot compile kernels: {error.name} is not installed; "
                "run: pip install 'nvgemm-aot[build]'"
            ) from error

    def prepare(self) -> None:
        """Import the compiler and compile nothing once; see `Provider.prepare`.

        Drops the compiler's variables from this process's environment: they change the code that
        comes out, and the cache knows nothing of them.
        """
        for name in [name for name in os.environ if name.startswith(_COMPILER_VARIABLES)]:
            value = os.environ.pop(name)
            if (name, value) != (_ARCHITECTURE_VARIABLE, _ARCHITECTURE):
                _log.warning("%s=%s is ignored by builds", name, value)
        os.environ[_ARCHITECTURE_VARIABLE] = _ARCHITECTURE
        _import_operators()
        _warm_up()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """List operators by their metadata; see `Provider.enumerate`."""
        candidates, rejections = [], []
        for operator in self._operators(signature, target.target.arch).values():
            reason = _unfit(operator, signature, target)
            if reason is None:
                candidates.append(self._candidate(operator, signature))
            else:
                rejections.append(
                    Rejection(operator=operator.metadata.operator_name, reason=reason)
                )
        return Enumeration(candidates=tuple(candidates), rejections=tuple(rejections))

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """NvMatmulHeuristics' model of the device; see `Provider.runtime_model`."""
        device = target.device
        return MatmulHeuristics(device.heuristics_gpu, device.shared_memory_per_block_bytes.value)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compile one operator to an object; see `Provider.compile`."""
        arch = target.target.arch
        operator = self._operators(candidate.signature, arch)[candidate.operator]
        with _hardware_facts(target.device) as asked, tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "kernel.o"
            try:
                _warm_up()
                artifact = operator.compile(
                    _sample_arguments(candidate.signature), target_sm=arch.removeprefix("sm_")
                )
                _use_baseline_host_code(artifact.compiled_obj.ir_module)
                artifact.compiled_obj.export_to_c(
                    object_file_path=str(path), function_name=_FUNCTION_NAME
                )
            except OSError:
                raise
            except Exception as error:  # the compiler raises whatever its passes raise
                raise CompileError(
                    f"{candidate.operator} for {arch}: {_first_line(error)}"
                ) from error
            unexpected = sorted(asked - set(candidate.cluster_sizes))
            if unexpected:
                raise CompileError(
                    f"{candidate.operator} for {arch}: asked for the capacity of clusters of "
                    f"{unexpected}, declared {candidate.cluster_sizes}: "
                    "this provider does not know the operator well enough to cache it"
                )
            return path.read_bytes()

    @functools.cached_property
    def _operator_cache(self) -> dict[tuple[Signature, str], dict[str, Any]]:
        return {}

    def _operators(self, signature: Signature, arch: str) -> dict[str, Any]:
        """Operators of a signature by name, in the order that the library lists them."""
        key = (signature, arch)
        if key not in self._operator_cache:
            found = _import_operators().get_operators(
                args=_sample_arguments(signature), target_sm=arch.removeprefix("sm_")
            )
            self._operator_cache[key] = {
                operator.metadata.operator_name: operator for operator in found
            }
        return self._operator_cache[key]

    def _candidate(self, operator: Any, signature: Signature) -> Candidate:
        metadata = operator.metadata
        design = _design(metadata)
        constraints = (metadata.operands.A, metadata.operands.B, metadata.operands.out)
        workspace = operator.get_workspace_size(_sample_arguments(signature))
        return Candidate(
            provider=self.name,
            operator=metadata.operator_name,
            signature=signature,
            calling_convention=f"tvm_ffi:{_FUNCTION_NAME}(a,b,out,stream)",
            design=design,
            cluster_sizes=_cluster_sizes(design),
            block_shape=_block_shape(metadata, design),
            preference=_preference(design),
            alignment_bytes=max(operand.ptr_alignment_bytes for operand in constraints),
            workspace_bytes=workspace.size_bytes,
        )


def _unfit(operator: Any, signature: Signature, target: BuildTarget) -> str | None:
    """Why an operator that the library lists is no candidate, or None."""
    kind = type(operator).__name__
    native = target.target.capability[0] * 10
    designed_for = operator.metadata.operator_class.designed_for_min_cc
    if designed_for < native:
        return f"designed for sm_{designed_for}: it does not use the tensor cores of sm_{native}"
    if kind == _EFC_OPERATOR:
        return "its epilogue fusion has nothing to fuse; the plain operator has the same main loop"
    if DType.UINT8 in (signature.a, signature.b):
        # Seen with cutlass-dsl 4.8.1 on sm_90a and sm_100a: the cubin equals the int8 one.
        return "compiles to the int8 kernel, whose products are signed: results would be wrong"
    k_major = signature.layout.a_row_major and not signature.layout.b_row_major
    if kind == _SM90_OPERATOR and signature.a.bits == 8 and not k_major:
        return "WGMMA reads 8-bit operands only along k (layout tn): it does not compile"
    return None


def _design(metadata: Any) -> KernelDesign:
    design = metadata.design
    tile_m, tile_n, tile_k = design.tile_shape
    if metadata.operator_class.__name__ == _TGV_OPERATOR:
        tile_m, tile_n = tile_n, tile_m  # it computes the transposed problem
    fallback = getattr(design, "fallback_cluster_shape", None)
    return KernelDesign(
        tile=(tile_m, tile_n, tile_k),
        ctas_per_tile=2 if getattr(design, "use_2cta_mma", False) else 1,
        cluster=(design.cluster_shape[0], design.cluster_shape[1]),
        fallback_cluster=None if fallback is None else (fallback[0], fallback[1]),
        scheduler=_scheduler(metadata),
    )


def _scheduler(metadata: Any) -> str:
    kind = metadata.operator_class.__name__
    if kind == _SM90_OPERATOR:
        return "static_persistent"
    if kind == _TGV_OPERATOR:
        return "one_tile"
    return _SCHEDULERS[type(metadata.design.tile_scheduler).__name__]


def _cluster_sizes(design: KernelDesign) -> tuple[int, ...]:
    if design.scheduler != "static_persistent":
        return ()
    shapes = [design.cluster, *([design.fallback_cluster] if design.fallback_cluster else [])]
    return tuple(sorted({m * n for m, n in shapes}))


def _block_shape(metadata: Any, design: KernelDesign) -> BlockShape:
    tile_m, tile_n, tile_k = metadata.design.tile_shape
    return BlockShape(
        tile=(tile_m // design.ctas_per_tile, tile_n, tile_k),
        cluster=design.cluster,
        swapped=metadata.operator_class.__name__ == _TGV_OPERATOR,
    )


def _preference(design: KernelDesign) -> int:
    """Prior order of schedulers: dynamic ones balance uneven waves; fallbacks cost a little."""
    return 2 * (design.scheduler == "static_persistent") + (design.fallback_cluster is not None)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


@functools.cache
def _import_operators() -> Any:
    """Import the compiler (about 1.7 s).

    Raises:
        ToolchainError: If a part of it is missing.
    """
    with warnings.catch_warnings():
        # torch says so once where NumPy, which nothing here uses, is not installed.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        try:
            import cutlass.operators
            import torch._subclasses.fake_tensor  # noqa: F401
        except ImportError as error:
            raise ToolchainError(
                f"cannot compile kernels: {error}; run: pip install 'nvgemm-aot[build]'"
            ) from error
    return cutlass.operators


@functools.cache
def _sample_arguments(signature: Signature) -> Any:
    """Operands that exist only as shapes, on a GPU that need not exist."""
    operators = _import_operators()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    extents = _SAMPLE_EXTENTS
    batch = (extents["batch"],) if signature.op is Op.BMM else ()

    def operand(rows: int, columns: int, dtype: DType, row_major: bool) -> Any:
        kind = getattr(torch, dtype.torch_name)
        if row_major:
            return torch.empty((*batch, rows, columns), dtype=kind, device="cuda")
        return torch.empty((*batch, columns, rows), dtype=kind, device="cuda").mT

    m, n, k = extents["m"], extents["n"], extents["k"]
    with FakeTensorMode():
        return operators.GemmArguments(
            A=operand(m, k, signature.a, signature.layout.a_row_major),
            B=operand(k, n, signature.b, signature.layout.b_row_major),
            out=operand(m, n, signature.out, row_major=True),
            accumulator_type=getattr(torch, signature.accumulator.torch_name),
        )


@contextlib.contextmanager
def _hardware_facts(device: DeviceProfile) -> Iterator[set[int]]:
    """Answer the compiler's questions about the GPU from a device profile.

    Yields:
        The cluster sizes that were asked for.
    """
    import cutlass.utils

    asked: set[int] = set()

    class ProfileHardwareInfo:
        """Takes the place of the class that asks the driver, which may not be there."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def get_max_active_clusters(self, cluster_size: int, *_: Any, **__: Any) -> int:
            asked.add(cluster_size)
            return device.cluster_capacity(cluster_size).value

    original = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = ProfileHardwareInfo
    try:
        yield asked
    finally:
        cutlass.utils.HardwareInfo = original


def _use_baseline_host_code(module: Any) -> None:
    """Have host functions compiled for `_HOST_CPU`; the exporter takes no such option."""
    from cutlass._mlir import ir

    with module.context:
        features = ir.Attribute.parse(f'#llvm.target_features<["{_HOST_FEATURES}"]>')
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                operation.operation.attributes["target_cpu"] = ir.StringAttr.get(_HOST_CPU)
                operation.operation.attributes["target_features"] = features


@functools.cache
def _warm_up() -> None:
    """Compile nothing once: a cross-architecture compile must not be a process's first one.

    See NVIDIA/cutlass#2859.
    """
    from cutlass import cute

    @cute.jit  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    cute.compile(nothing)
