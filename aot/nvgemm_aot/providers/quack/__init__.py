"""Provider of quack-kernels' dense GEMMs, CuTe-DSL kernels for Hopper and Blackwell.

`designs` says which specialisations are offered, `entry` compiles one. It may import what
`providers` may. The library and the compiler are imported when a kernel is first compiled, never to
list candidates. quack changes classes of the DSL in the process that imports it, so a compiler
process works for one provider alone.
"""

from __future__ import annotations

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, PLAIN, STREAM, WORKSPACE
from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.errors import CompileError, ToolchainError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import extra_roles
from nvgemm_runtime.gemm.support import unsupported

from ...targets import BuildTarget
from .. import cute_dsl
from ..base import BlockShape, Candidate, Enumeration, RuntimeModel
from ..heuristics import MatmulHeuristics
from .designs import HOPPER, Design, designs, workspace_of
from .entry import ALIGNMENT_BYTES, CUTE_TYPES, compile_entry, import_library

_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "quack-kernels",
)
"""Distributions whose versions shape the code."""

_VARIABLES = ("QUACK_",)
"""Prefix of the environment variables that the library reads."""

_OPERANDS = tuple(dtype for dtype in CUTE_TYPES if dtype.bits == 16)


class Quack:
    """Lists and compiles the dense GEMMs of quack-kernels."""

    name = "quack"
    recipe = f"2, host {cute_dsl.HOST_CPU} {cute_dsl.HOST_FEATURES}"

    def toolchain(self) -> dict[str, str]:
        """Versions of the compiler and the library; see `Provider.toolchain`."""
        return cute_dsl.installed_versions(_DISTRIBUTIONS, "quack's kernels")

    def prepare(self) -> None:
        """Import compiler and library, compile an empty function; see `Provider.prepare`."""
        cute_dsl.set_environment(also=_VARIABLES)
        import_library()
        cute_dsl.warm_up()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """List designs; see `Provider.enumerate`."""
        absence = unsupported(signature) or _why_absent(signature)
        if absence is not None:
            return Enumeration(absence=absence)
        arch = target.target.arch
        return Enumeration(
            candidates=tuple(self._candidate(one, signature, arch) for one in designs(arch))
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """NvMatmulHeuristics' model of the device; see `Provider.runtime_model`."""
        device = target.device
        return MatmulHeuristics(
            device.heuristics_gpu,
            device.shared_memory_per_block_bytes.value,
            device.sm_count.value,
        )

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compile one design to an object; see `Provider.compile`."""
        arch = target.target.arch
        named = {_operator(one, candidate.signature, arch): one for one in designs(arch)}
        try:
            cute_dsl.warm_up()
            compiled = compile_entry(named[candidate.operator], candidate.signature, arch)
            return cute_dsl.export_object(compiled)
        except (OSError, ToolchainError):
            raise
        except Exception as error:  # the compiler raises whatever its passes raise
            raise CompileError(
                f"{candidate.operator} for {arch}: {cute_dsl.first_line(error)}"
            ) from error

    def _candidate(self, design: Design, signature: Signature, arch: str) -> Candidate:
        static = arch == HOPPER
        workspace = workspace_of(design)
        parameters = ["a", "b", "out", *([WORKSPACE] if workspace else [])]
        parameters += [*([CLUSTERS] if static else []), STREAM]
        tile_k, ctas = design.tile_k(signature.a), design.ctas_per_tile(arch)
        m, n = design.tile
        return Candidate(
            provider=self.name,
            operator=_operator(design, signature, arch),
            signature=signature,
            design=KernelDesign(
                tile=(n, m, tile_k) if design.swapped else (m, n, tile_k),
                ctas_per_tile=ctas,
                cluster=design.cluster[::-1] if design.swapped else design.cluster,
                fallback_cluster=None,
                scheduler="static_persistent" if static else "clc",
                swapped=design.swapped,
                splits=design.splits,
                dependent_launch=True,
            ),
            cluster_sizes=(),
            block_shape=BlockShape(
                tile=(m // ctas, n, tile_k),
                cluster=design.cluster,
                swapped=design.swapped,
                splits=design.splits,
            ),
            preference=2 if design.in_any_order else 0 if design.pingpong or not static else 1,
            alignment_bytes=ALIGNMENT_BYTES,
            workspace_bytes=0,
            workspace=workspace,
            is_deterministic=not design.in_any_order,
            calling_convention=f"tvm_ffi:{PLAIN.name}({','.join(parameters)})",
        )


def _why_absent(signature: Signature) -> str | None:
    if signature.op not in (Op.MM, Op.BMM) or extra_roles(signature):
        return f"quack's plain GEMMs do not compute {signature.key}"
    if signature.a not in _OPERANDS or signature.out not in CUTE_TYPES:
        return (
            f"of quack, GEMMs of {' and '.join(one.value for one in _OPERANDS)} into "
            f"{', '.join(one.value for one in CUTE_TYPES)} are offered (here {signature.a.value} "
            f"into {signature.out.value})"
        )
    return None


def _operator(design: Design, signature: Signature, arch: str) -> str:
    """Name of a design: unique among those of its signature and architecture."""
    m, n = design.tile
    kind = ("pingpong" if design.pingpong else "cooperative") if arch == HOPPER else "clc"
    family = "Sm90" if arch == HOPPER else "Sm100"
    order = "parallel" if design.in_any_order else "serial"
    split = f"_split_k{design.splits}_{order}" if design.splits > 1 else ""
    return (
        f"quack.GemmDefault{family}_{kind}_cluster{design.cluster[0]}x{design.cluster[1]}x1"
        f"_tile{m}x{n}x{design.tile_k(signature.a)}{'_swap_ab' if design.swapped else ''}{split}"
    )
