"""The interface of a source of kernels, and of the model that ranks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nvgemm_runtime.bundle.format import KernelFacts
from nvgemm_runtime.gemm.problem import Problem, Signature

from ..targets import BuildTarget

INTERFACE_VERSION = 1
"""Version of this interface. It changes when a provider written for it would no longer work."""

INTERFACE_VERSIONS = (1,)
"""Versions that are accepted."""

RECIPE_PREFIX = "recipe of "
"""Beginning of the names under which bundles state recipes beside versions."""

CLC = "clc"
STATIC_PERSISTENT = "static_persistent"
DYNAMIC_PERSISTENT = "dynamic_persistent"
ONE_TILE = "one_tile"
"""Schedulers: cluster launch control; a fixed number of blocks, each with several tiles, which are
known from the start, or taken from a counter in the workspace; one block a tile."""

SCHEDULERS = (CLC, DYNAMIC_PERSISTENT, ONE_TILE, STATIC_PERSISTENT)


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What a runtime model needs to know of a kernel: what one thread block computes and loads.

    Attributes:
        tile: Extents (m, n, k) of one thread block's tile.
        cluster: Thread blocks of a cluster along (m, n).
        swapped: Whether the kernel computes the transposed problem (its m is the problem's n).
        splits: Thread blocks that share the k of one tile.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    swapped: bool = False
    splits: int = 1


class RuntimeModel(Protocol):
    """A model of one device.

    Creating one must be quick, because plans are looked up by its name: load what is slow to load
    with the first estimate.
    """

    @property
    def name(self) -> str:
        """Name and version, as rankings state it, e.g. ``nvidia-matmul-heuristics 0.1.0.27``.

        Raises:
            ToolchainError: If the model is not installed.
        """

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Estimate the runtime of ``problem``: nanoseconds, or None where there is no answer.

        Raises:
            ToolchainError: If the model cannot be loaded, or does not know the device.
        """


@dataclass(frozen=True, kw_only=True)
class Candidate(KernelFacts):
    """An operator that could be compiled for a signature; its design has no cluster limits yet.

    Attributes:
        cluster_sizes: Sizes, in thread blocks, of the clusters whose number on the device is
            compiled in: with a persistent scheduler those of its clusters, unless each launch is
            told; else empty.
        block_shape: What the runtime model needs to know of it.
        preference: Order among operators that the model cannot tell apart; lower is better.
        added_code: What the provider adds to the operator's own code, such as an epilogue's source.
            It is part of the cache key.
        traits: Words for how it works beyond its design, such as ``pingpong``: corrections of
            estimates may have a weight for each.
    """

    cluster_sizes: tuple[int, ...]
    block_shape: BlockShape
    preference: int
    added_code: str = ""
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """An operator that was not chosen, and why."""

    operator: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Enumeration:
    """All operators that a provider knows for a signature on a target.

    Attributes:
        candidates: Those that can be compiled.
        rejections: Those left out.
        absence: Why no operator is made for such signatures, or None if some are.
    """

    candidates: tuple[Candidate, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    absence: str | None = None


class Provider(Protocol):
    """A source of kernels. Instances are created anew in each compiler process.

    Attributes:
        interface: The version of this interface that it is written for, `INTERFACE_VERSION`.
        name: Its name in manifests: in the table of providers, or that of its entry point, or
            ``module:class``.
        recipe: Name of the way its objects are made, part of the cache key. It must change when the
            same versions of the toolchain would give other code.
    """

    interface: int
    name: str
    recipe: str

    def toolchain(self) -> dict[str, str]:
        """Versions of everything that shapes the code, by distribution name. Must be quick.

        Everything that was planned or compiled is made anew where one of them differs. The
        distribution of an entry point counts without being named here.

        Raises:
            ToolchainError: If a package is missing, with the command that installs it.
        """

    def prepare(self) -> None:
        """Do what is slow and needed once a process, such as importing a compiler.

        Raises:
            ToolchainError: If a part of the compiler side is missing.
        """

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """List the operators for ``signature`` that can run on ``target``, and those left out.

        An operator's name is unique among those of a signature and target, and stands for the same
        code as long as `toolchain` and ``recipe`` do. The order does not matter. For a signature
        that it does not know, a provider gives an absence.
        """

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """The model of ``target``'s device by which its operators are ranked."""

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compile one candidate that `enumerate` listed, in this process or in another one.

        Its design has the cluster limits of the target's device by now.

        Returns:
            A relocatable object for the host platform that holds the device code.

        Raises:
            CompileError: If the operator does not compile, with the compiler's own words.
        """
