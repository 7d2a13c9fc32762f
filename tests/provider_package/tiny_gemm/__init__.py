"""A provider of kernels in a package of its own: 16-bit GEMMs for Hopper, of any size and layout.

Written against docs/develop/providers.md. Importing this is cheap; the kernel is in `kernel`.
"""

from __future__ import annotations

from nvgemm_aot.providers import cute_dsl
from nvgemm_aot.providers.interface import (
    INTERFACE_VERSION,
    ONE_TILE,
    PLAIN,
    BlockShape,
    BuildTarget,
    Candidate,
    DType,
    Enumeration,
    KernelDesign,
    Op,
    Rejection,
    RuntimeModel,
    Signature,
    extra_roles,
    matmul_heuristics,
)

TILES = ((64, 64, 32), (128, 64, 32))
"""Extents (m, n, k) of a thread block's tile."""

ARCHITECTURE = "sm_90a"

_OPERANDS = (DType.FP16, DType.BF16)


class TinyGemm:
    """Lists and compiles the GEMM of `kernel`, in each of `TILES`."""

    interface = INTERFACE_VERSION
    name = "tiny_gemm"
    recipe = cute_dsl.recipe("2")

    def toolchain(self) -> dict[str, str]:
        """The compiler's versions; this package's own is added by its entry point."""
        return cute_dsl.installed_versions(cute_dsl.DISTRIBUTIONS, "tiny_gemm's kernels")

    def prepare(self) -> None:
        """Import the compiler, and compile something small first."""
        cute_dsl.set_environment()
        cute_dsl.warm_up()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Offer each tile for plain products of 16-bit floats."""
        if target.target.arch != ARCHITECTURE:
            return Enumeration(absence=f"tiny_gemm is for {ARCHITECTURE} alone")
        if (
            signature.op is not Op.MM
            or signature.epilogue is not None
            or extra_roles(signature)
            or signature.a not in _OPERANDS
            or signature.out not in (signature.a, DType.FP32)
        ):
            return Enumeration(absence=f"tiny_gemm does not compute {signature.key}")
        return Enumeration(
            candidates=tuple(self._candidate(tile, signature) for tile in TILES),
            rejections=(
                Rejection(operator="tiny_gemm_tile256x256x32", reason="its sums do not fit"),
            ),
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """NVIDIA's model, which knows tiles."""
        return matmul_heuristics(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compile one tile."""
        from .kernel import make_gemm

        signature = candidate.signature
        samples = cute_dsl.sample_tensors(signature, candidate.alignment_bytes)
        return cute_dsl.compile_object(
            make_gemm(candidate.design.tile, signature.a),
            samples.values(),
            arch=target.target.arch,
            name=candidate.operator,
            platform=target.target.platform,
        )

    def _candidate(self, tile: tuple[int, int, int], signature: Signature) -> Candidate:
        m, n, k = tile
        return Candidate(
            provider=self.name,
            operator=f"tiny_gemm_tile{m}x{n}x{k}",
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
            preference=10,
            # It loads element by element: addresses need no more than an element's alignment.
            alignment_bytes=signature.a.bits // 8,
            workspace_bytes=0,
            calling_convention=PLAIN.text,
        )
