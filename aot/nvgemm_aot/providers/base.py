"""Interfaces for kernel providers and runtime models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nvgemm_runtime.bundle.format import KernelFacts
from nvgemm_runtime.gemm.problem import Problem, Signature

from ..targets import BuildTarget

INTERFACE_VERSION = 1
"""Interface version. Increases when existing providers would stop working."""

INTERFACE_VERSIONS = (1,)
"""Accepted interface versions."""

RECIPE_PREFIX = "recipe of "
"""Prefix for recipe names in a bundle's toolchain."""

CLC = "clc"
STATIC_PERSISTENT = "static_persistent"
DYNAMIC_PERSISTENT = "dynamic_persistent"
ONE_TILE = "one_tile"
"""Schedulers: cluster launch control; a fixed number of thread blocks with several tiles each,
assigned at launch or taken from a counter in the workspace; one thread block per tile."""

SCHEDULERS = (CLC, DYNAMIC_PERSISTENT, ONE_TILE, STATIC_PERSISTENT)


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Kernel facts for a runtime model: tile, cluster and splits.

    Attributes:
        tile: Extents (m, n, k) of one thread block's tile.
        cluster: Thread blocks per cluster along (m, n).
        swapped: True if the kernel computes the transposed problem (its m is the problem's n).
        splits: Thread blocks that share the k of one tile.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    swapped: bool = False
    splits: int = 1


class RuntimeModel(Protocol):
    """Runtime model for one device.

    Construction must be quick, because plan lookups need the name: load slow parts with the first
    estimate.
    """

    @property
    def name(self) -> str:
        """Model name and version in rankings, e.g. ``nvidia-matmul-heuristics 0.1.0.27``.

        Raises:
            ToolchainError: If the model is not installed.
        """

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Estimates the runtime for ``problem`` in nanoseconds, or returns None if unknown.

        Raises:
            ToolchainError: If the model cannot be loaded, or does not know the device.
        """


@dataclass(frozen=True, kw_only=True)
class Candidate(KernelFacts):
    """Operator that can be compiled for a signature, without the design's cluster limits.

    Attributes:
        cluster_sizes: Cluster sizes, in thread blocks, whose device capacity is compiled in: those
            that a persistent scheduler uses. Empty for other schedulers, and if each launch passes
            the number of clusters.
        block_shape: Facts for the runtime model.
        preference: Order among operators with equal estimates; lower is better.
        added_code: Code that the provider adds to the operator's own, such as an epilogue's source.
            Part of the cache key.
        traits: Properties beyond the design, such as ``pingpong``. Corrections may have a weight
            for each.
    """

    cluster_sizes: tuple[int, ...]
    block_shape: BlockShape
    preference: int
    added_code: str = ""
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Operator left out, with the reason."""

    operator: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Enumeration:
    """All operators that a provider knows for a signature and target.

    Attributes:
        candidates: Operators that can be compiled.
        rejections: Operators left out.
        absence: Reason why no operator exists for such signatures; None if some do.
    """

    candidates: tuple[Candidate, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    absence: str | None = None


class Provider(Protocol):
    """Kernel provider. Each compiler process creates its own instances.

    Attributes:
        interface: Interface version that the provider implements, `INTERFACE_VERSION`.
        name: Name in manifests: a key of the provider table, an entry point, or ``module:class``.
        recipe: Name for the way objects are made, part of the cache key. Must change if the same
            toolchain versions would give different code.
    """

    interface: int
    name: str
    recipe: str

    def toolchain(self) -> dict[str, str]:
        """Returns the versions that shape the code, by distribution name. Must be quick.

        A changed version invalidates cached plans and kernels. The entry point's distribution is
        added automatically.

        Raises:
            ToolchainError: If a package is missing, with the command that installs it.
        """

    def prepare(self) -> None:
        """Does slow work that each process needs once, such as importing a compiler.

        Raises:
            ToolchainError: If part of the builder is missing.
        """

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Lists the operators for ``signature`` that run on ``target``, and those left out.

        An operator's name is unique for a signature and target. It means the same code as long as
        `toolchain` and ``recipe`` stay the same. Order does not matter. For an unknown signature, a
        provider returns an absence.
        """

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """Returns the runtime model that ranks operators for ``target``'s device."""

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compiles a candidate that `enumerate` listed, in this process or another one.

        By now, its design has the cluster limits for the target's device.

        Returns:
            A relocatable object for the host platform that holds the device code.

        Raises:
            CompileError: If the operator does not compile, with the compiler's own words.
        """
