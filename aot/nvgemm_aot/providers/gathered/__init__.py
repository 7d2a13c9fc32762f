"""Provider for sums of gathered rows (``gathered_mm``), computed by this project's kernel.

`kernel` holds the kernel, in CuTe DSL. No model estimates it; the first design is the usual choice.
May import what `providers` may. The compiler is imported when a kernel is first compiled, never to
list candidates.
"""

from __future__ import annotations

from nvgemm_runtime.bundle.calling_convention import STREAM, CallingConvention
from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import roles
from nvgemm_runtime.gemm.support import unsupported

from ...targets import BuildTarget
from .. import cute_dsl
from ..base import (
    INTERFACE_VERSION,
    ONE_TILE,
    BlockShape,
    Candidate,
    Enumeration,
    RuntimeModel,
)
from ..heuristics.estimates import matmul_heuristics
from ..sources import source_digest

TILES = ((1, 1024, 1), (1, 1024, 4))
"""Result rows and columns per thread block, and rows of B that a thread loads before it uses the
first. The usual choice comes first.

A block has 128 threads, so few are idle at the end of a row. On an H200, the first was the fastest
among ten designs, or within 0.5 % of it, for all twelve sums in three models' experts
(benchmarks/results/moe-h200.jsonl). The others loaded 2 or 4 rows of B at
once, or had 2, 4 or 8 result rows per thread. The second is for few rows, which do not fill
multiprocessors with warps.
"""

ALIGNMENT_BYTES = 16
"""Bytes that a thread loads and stores at once: B, the result and their rows are aligned to it. A
and the row indices are read by element."""


class Gathered:
    """Lists and compiles `kernel`'s kernel in each of `TILES`."""

    interface = INTERFACE_VERSION
    name = "gathered"
    recipe = cute_dsl.recipe("1")

    def toolchain(self) -> dict[str, str]:
        """Returns the compiler's versions; see `Provider.toolchain`.

        Raises:
            ToolchainError: If one is missing.
        """
        return cute_dsl.installed_versions(cute_dsl.DISTRIBUTIONS, "kernels of gathered rows")

    def prepare(self) -> None:
        """Imports the compiler, compiles an empty function; see `Provider.prepare`."""
        cute_dsl.set_environment()
        cute_dsl.warm_up()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Lists a design for each of `TILES`, on every target; see `Provider.enumerate`."""
        absence = unsupported(signature)
        if absence is None and signature.op is not Op.GATHERED_MM:
            absence = f"gathered computes {Op.GATHERED_MM.value} alone (here {signature.op.value})"
        if absence is not None:
            return Enumeration(absence=absence)
        return Enumeration(
            candidates=tuple(
                self._candidate(tile, preference, signature)
                for preference, tile in enumerate(TILES)
            )
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """Returns the usual model, without estimates for these; see `Provider.runtime_model`."""
        return matmul_heuristics(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compiles one design to an object; see `Provider.compile`."""
        from .kernel import make_gathered_mm, sample_tensors

        dtype = candidate.signature.out
        return cute_dsl.compile_object(
            make_gathered_mm(candidate.design.tile, dtype),
            sample_tensors(dtype),
            arch=target.target.arch,
            name=candidate.operator,
            platform=target.target.platform,
        )

    def _candidate(
        self, tile: tuple[int, int, int], preference: int, signature: Signature
    ) -> Candidate:
        m, n, k = tile
        parameters = (*(role.value for role in roles(signature)), STREAM)
        convention = CallingConvention(name=cute_dsl.FUNCTION_NAME, parameters=parameters)
        return Candidate(
            provider=self.name,
            operator=f"gathered.GatheredMm_tile{m}x{n}x{k}",
            signature=signature,
            design=KernelDesign(
                tile=tile,
                ctas_per_tile=1,
                cluster=(1, 1),
                fallback_cluster=None,
                scheduler=ONE_TILE,
            ),
            cluster_sizes=(),
            block_shape=BlockShape(tile=tile, cluster=(1, 1)),
            preference=preference,
            alignment_bytes=ALIGNMENT_BYTES,
            workspace_bytes=0,
            calling_convention=str(convention),
            added_code=f"kernel {source_digest(__name__)}",
        )
