"""Runtime estimates from nvMatmulHeuristics' analytical model. Needs no GPU.

The model knows plain GEMMs. Scales and epilogues are ignored, because they cost nearly the same in
every compared kernel. Groups are modelled as a batch of equal GEMMs; costs from `group_times`
replace these estimates.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nvgemm_runtime.errors import ToolchainError, install_command
from nvgemm_runtime.gemm.problem import DType, Op, Problem

from ...targets import BuildTarget
from ..base import BlockShape

_DISTRIBUTION = "nvidia-matmul-heuristics"

_FILL_NS = 2_000
"""Assumed cost for zeroing the counters before a split-k kernel, in nanoseconds. Not measured. It
alone decides whether a short kernel is split."""

_REDUCTION_BYTES_PER_NS = 4_000
"""Assumed bandwidth for writing partial results to L2 and reading them again. Not measured: near
the bandwidth of H200 memory, which is below L2's."""

_MIN_TILE_N = 32
"""Narrowest tile that the model supports on SM100. Narrower tiles get its estimate."""

_MIN_TILE_K_BYTES = 128
"""Smallest tile extent along k that the model supports, in bytes: one row of 128-byte swizzled
shared memory."""


class MatmulHeuristics:
    """nvMatmulHeuristics' model for one GPU product.

    Args:
        gpu: Product name in nvMatmulHeuristics, e.g. ``H200_SXM``.
        shared_memory_bytes: Shared memory per thread block, which bounds the pipeline stages.
        multiprocessors: Number of multiprocessors.

    The first estimate imports the package and loads the calibration.
    """

    def __init__(self, gpu: str, shared_memory_bytes: int, multiprocessors: int) -> None:
        self._gpu = gpu
        self._multiprocessors = multiprocessors
        self._shared_memory_bytes = shared_memory_bytes
        self._calibrated: set[tuple[str, Any]] = set()

    @property
    def name(self) -> str:
        """Model name and version; see `RuntimeModel.name`."""
        try:
            return f"{_DISTRIBUTION} {version(_DISTRIBUTION)}"
        except PackageNotFoundError as error:
            raise ToolchainError(
                f"cannot rank kernels: {_DISTRIBUTION} is not installed; "
                f"run: {install_command('build')}"
            ) from error

    @functools.cached_property
    def _interface(self) -> Any:
        import nvMatmulHeuristics as model  # noqa: N813

        if self._gpu not in model.NvMatmulHeuristicsNvidiaGpu.__members__:
            raise ToolchainError(f"{self.name} does not model {self._gpu!r}")
        # CUTLASS3 is the backend whose kernels resemble CuTe-DSL ones: TMA, clusters.
        return model.NvMatmulHeuristicsInterfaceEx(
            backend=model.NvMatmulHeuristicsTarget.CUTLASS3,
            flags=model.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=model.NvMatmulHeuristicsNvidiaGpu[self._gpu],
        )

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Estimates a runtime; see `RuntimeModel.estimate_ns`.

        The package does not model split k for narrow tiles. Here, a split shortens a kernel whose
        tiles leave multiprocessors idle, in proportion to the work they take over. It adds the cost
        of zeroing counters and summing partial results. Sums of gathered rows, which tensor cores
        do not compute, have no estimate.
        """
        if problem.signature.op is Op.GATHERED_MM:
            return None
        whole_ns = self._unsplit_ns(problem, shape)
        if whole_ns is None or shape.splits == 1:
            return whole_ns
        tile_m, tile_n = shape.tile[:2]
        m, n = self._extents(problem, shape)
        tiles = -(-m // tile_m) * -(-n // tile_n) * problem.batch * problem.groups
        time_ns = float(whole_ns)
        if tiles < self._multiprocessors:
            waves = -(-tiles * shape.splits // self._multiprocessors)
            time_ns *= waves / shape.splits
        reduced_bytes = 4 * tiles * tile_m * tile_n * shape.splits
        return round(time_ns + _FILL_NS + reduced_bytes / _REDUCTION_BYTES_PER_NS)

    def _extents(self, problem: Problem, shape: BlockShape) -> tuple[int, int]:
        """Returns one group's extents (m, n) in the kernel's orientation."""
        rows = -(-problem.m // problem.groups)
        return (problem.n, rows) if shape.swapped else (rows, problem.n)

    def _unsplit_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Returns the package's estimate for a kernel without split k."""
        precision, layout = _precision(problem), _layout(problem, shape.swapped)
        if (precision, layout) not in self._calibrated:
            self._interface.loadInternalDiscoverySet(layout, precision=precision)
            self._calibrated.add((precision, layout))
        m, n = self._extents(problem, shape)
        question = self._interface.makeNvMatmulHeuristicsProblem(
            m, n, problem.k, layout, problem.batch * problem.groups
        )
        config = self._configuration(problem, shape)
        # The package's own wrapper for this function calls a missing method (0.1.0.27).
        seconds = self._interface.nvMatmulHeuristicsEstimateRuntime(
            self._interface.handle,
            precision.encode("ascii"),
            ctypes.c_int(self._interface.target),
            ctypes.byref(question),
            ctypes.byref(config),
            self._interface.hardware_descriptor,
        )
        return max(1, round(seconds * 1e9)) if seconds > 0 else None

    def _configuration(self, problem: Problem, shape: BlockShape) -> Any:
        bits = problem.signature.a.bits
        tile_m, tile_n = shape.tile[0], max(shape.tile[1], _MIN_TILE_N)
        tile_k = max(shape.tile[2], 8 * _MIN_TILE_K_BYTES // bits)
        stage_bytes = (tile_m + tile_n) * tile_k * bits // 8
        config = self._interface.nvmmhKernelConfiguration()
        config.cta[:] = (tile_m, tile_n, tile_k)
        config.warp[:] = (min(tile_m, 64), tile_n, tile_k)
        config.instr[:] = (min(tile_m, 64), tile_n, 256 // bits)
        config.splitK = 1
        config.loadStages = max(2, min(8, self._shared_memory_bytes // stage_bytes))
        config.gridSwizzle = 1
        config.ctaOrder = 0
        config.cluster[:] = shape.cluster
        return config


def matmul_heuristics(target: BuildTarget) -> MatmulHeuristics:
    """Creates the model for a target's device."""
    device = target.device
    return MatmulHeuristics(
        device.heuristics_gpu,
        device.shared_memory_per_block_bytes.value,
        device.sm_count.value,
    )


def _precision(problem: Problem) -> str:
    signature = problem.signature
    types = (signature.a, signature.b, signature.accumulator, signature.out)
    a, b, accumulator, out = map(_letter, types)
    if signature.a.bits <= 8 and not signature.a.is_integer:
        return f"{a}{b}{out}{accumulator}{out}"
    return f"{a}{accumulator}{out}"


def _layout(problem: Problem, swapped: bool) -> Any:
    from nvMatmulHeuristics import NvMatmulHeuristicsMatmulLayout as Layouts

    majors = problem.signature.layout.value.upper()
    if swapped:  # out^T = B^T A^T: operands and majors swap
        other = {"T": "N", "N": "T"}
        return Layouts[f"{other[majors[1]]}{other[majors[0]]}_COL_MAJOR"]
    return Layouts[f"{majors}_ROW_MAJOR"]


def _letter(dtype: DType) -> str:
    letter = dtype.row.heuristics_letter
    if letter is None:
        raise ToolchainError(f"{_DISTRIBUTION} does not model {dtype.value}")
    return letter
