"""Provider for quack-kernels' GEMMs: CuTe-DSL kernels on Hopper and Blackwell.

- `families`: kernel classes and their facts, by tensor-core instruction
- `designs`: specialisations that are offered
- `entry`: compiles dense GEMMs
- `epilogue`: scales and addends, then an activation
- `activation_functions`: activations, of sums and in gates
- `gated`: gates
- `gate_gradient`: gate gradients
- `gate_ups`: up projections that read a gate projection's result
- `grouped`: grouped GEMMs; `gathered_groups` gathers their rows
- `k_grouped`: GEMMs with groups along k

May import what `providers` may. The library and the compiler are imported when a kernel is first
compiled, never to list candidates. quack modifies DSL classes in the importing process, so a
compiler process serves only one provider.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.errors import CompileError, ToolchainError
from nvgemm_runtime.gemm.epilogues import GateForm
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.support import unsupported
from nvgemm_runtime.gemm.target import architecture
from nvgemm_runtime.gemm.types import DType

from ...targets import BuildTarget
from .. import cute_dsl
from ..base import (
    DYNAMIC_PERSISTENT,
    INTERFACE_VERSION,
    BlockShape,
    Candidate,
    Enumeration,
    RuntimeModel,
)
from ..heuristics.estimates import matmul_heuristics
from . import (
    activation_functions,
    epilogue,
    gate_gradient,
    gate_ups,
    gated,
    gathered_groups,
    grouped,
    k_grouped,
)
from .designs import Design, designs, workspace_of
from .entry import (
    ALIGNMENT_BYTES,
    CUTE_TYPES,
    calling_convention,
    compile_entry,
    import_library,
)
from .families import family_of, served_architectures

_LIBRARY = "quack-kernels"

_WITHOUT = "build without it: set providers: [cutlass_operators] in the manifest"
"""Next step in messages if the library is not wanted."""

ACCEPTED_VERSIONS = ("0.6.5",)
"""Accepted quack-kernels releases. The provider builds the library's kernel objects itself, from
classes and arguments that change without notice. Kernels from other releases are untested."""

_VARIABLES = ("QUACK_",)
"""Prefixes of environment variables that the library reads."""

_OPERANDS = tuple(dtype for dtype in CUTE_TYPES if dtype.bits <= 16)


class Quack:
    """Lists and compiles quack-kernels' GEMMs."""

    interface = INTERFACE_VERSION
    name = "quack"
    recipe = cute_dsl.recipe("3")

    def toolchain(self) -> dict[str, str]:
        """Returns the compiler's and the library's versions; see `Provider.toolchain`.

        Raises:
            ToolchainError: If one is missing, or the library's release is not in
                `ACCEPTED_VERSIONS`.
        """
        versions = cute_dsl.installed_versions(cute_dsl.DISTRIBUTIONS, "quack's kernels")
        try:
            versions |= cute_dsl.installed_versions((_LIBRARY,), "quack's kernels")
        except ToolchainError as error:
            raise ToolchainError(f"{error}, or {_WITHOUT}") from error
        version = versions[_LIBRARY]
        if version not in ACCEPTED_VERSIONS:
            accepted = " or ".join(ACCEPTED_VERSIONS)
            raise ToolchainError(
                f"cannot compile quack's kernels: {_LIBRARY} {version} is installed, must be "
                f"{accepted}, because other releases change internals that build its kernels; "
                f"run: pip install '{_LIBRARY}=={ACCEPTED_VERSIONS[-1]}', or {_WITHOUT}"
            )
        return versions

    def prepare(self) -> None:
        """Imports compiler and library, compiles an empty function; see `Provider.prepare`."""
        cute_dsl.set_environment(also=_VARIABLES)
        import_library()
        cute_dsl.warm_up()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Lists designs; see `Provider.enumerate`."""
        arch = target.target.arch
        absence = unsupported(signature) or _absence_reason(signature, arch)
        if absence is not None:
            return Enumeration(absence=absence)
        offered = _offered_designs(signature, arch)
        if not offered:
            return Enumeration(absence=f"quack has no design of {signature.key} for {arch}")
        return Enumeration(
            candidates=tuple(self._candidate(design, signature, arch) for design in offered)
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """Returns NvMatmulHeuristics' model for the device; see `Provider.runtime_model`."""
        return matmul_heuristics(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compiles one design to an object; see `Provider.compile`."""
        arch = target.target.arch
        try:
            cute_dsl.warm_up()
            compiled = _compiled(candidate.operator, candidate.signature, arch)
            return cute_dsl.export_object(compiled, target.target.platform)
        except (OSError, ToolchainError):
            raise
        except Exception as error:  # compiler passes may raise anything
            raise CompileError(
                f"{candidate.operator} for {arch}: {cute_dsl.first_line(error)}"
            ) from error

    def _candidate(self, design: Design, signature: Signature, arch: str) -> Candidate:
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
                scheduler=_scheduler(design, arch),
                swapped=design.swapped,
                splits=design.splits,
                dependent_launch=gathered_groups.may_begin_early(signature, arch),
            ),
            cluster_sizes=(),
            block_shape=BlockShape(
                tile=(m // ctas, n, tile_k),
                cluster=design.cluster,
                swapped=design.swapped,
                splits=design.splits,
            ),
            preference=_preference(design, arch),
            alignment_bytes=ALIGNMENT_BYTES,
            workspace_bytes=0,
            workspace=workspace_of(design, arch),
            is_deterministic=not design.in_any_order,
            calling_convention=str(calling_convention(design, signature, arch)),
            added_code=_added_code(signature),
            traits=("pingpong",) if design.pingpong else (),
        )


def _scheduler(design: Design, arch: str) -> str:
    if design.dynamic:
        return DYNAMIC_PERSISTENT
    return family_of(arch).scheduler


def _preference(design: Design, arch: str) -> int:
    """Returns the order among designs with equal estimates.

    Dynamic schedules come last: no measurement favours them.
    """
    if design.dynamic:
        return 4
    if design.in_any_order:
        return 2
    return 0 if design.pingpong or not family_of(arch).has_pingpong else 1


def _added_code(signature: Signature) -> str:
    """Returns source digests of the project's own epilogues and schedulers, for cache keys."""
    applied = signature.epilogue
    added = {
        "gate": (gated, signature.is_gated),
        "gradient": (gate_gradient, signature.is_gradient or signature.form is GateForm.UPS),
        "ups": (gate_ups, signature.form is GateForm.UPS),
        "groups": (grouped, signature.op.groups_rows),
        "gathered groups": (gathered_groups, gathered_groups.gathers(signature)),
        "groups along k": (k_grouped, signature.op is Op.K_GROUPED_MM),
        "epilogue": (epilogue, epilogue.has_own_epilogue(signature) and not signature.is_gated),
        "activation": (
            activation_functions,
            applied is not None and applied.activation is not None,
        ),
    }
    return ", ".join(
        f"{part} {_source_digest(module)}" for part, (module, is_added) in added.items() if is_added
    )


@functools.cache
def _source_digest(module: ModuleType) -> str:
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()


def _offered_designs(signature: Signature, arch: str) -> tuple[Design, ...]:
    if signature.is_gradient:
        return gate_gradient.designs(arch, signature)
    if signature.form is GateForm.UPS:
        return gate_ups.designs(arch, signature)
    if signature.is_gated:
        return gated.designs(arch, signature)
    if signature.op.groups_rows:
        return grouped.designs(arch, signature)
    if signature.op is Op.K_GROUPED_MM:
        return k_grouped.designs(arch, signature)
    return designs(arch, signature)


@functools.lru_cache(maxsize=1)
def _compiled(operator: str, signature: Signature, arch: str) -> Any:
    """Compiles an operator's design. Caches the last result, for export to another platform."""
    by_name = {
        _operator(design, signature, arch): design for design in _offered_designs(signature, arch)
    }
    return _compiler_of(signature)(by_name[operator], signature, arch)


def _compiler_of(signature: Signature) -> Callable[[Design, Signature, str], Any]:
    if signature.is_gradient:
        return gate_gradient.compile_gate_gradient
    if signature.form is GateForm.UPS:
        return gate_ups.compile_gate_ups
    if signature.is_gated:
        return gated.compile_gated
    if signature.op is Op.K_GROUPED_MM:
        return k_grouped.compile_k_grouped
    return grouped.compile_grouped if signature.op.groups_rows else compile_entry


def _absence_reason(signature: Signature, arch: str) -> str | None:
    if arch not in (served := served_architectures()):
        return f"quack has no kernels for {arch} (it has for {', '.join(served)})"
    row = architecture(arch)
    if signature.is_gated:
        return None  # `unsupported` has checked it
    if signature.op.has_groups:
        return None  # `unsupported` has checked it
    if signature.scales is not None and signature.scales.is_swizzled:
        return f"quack's dense GEMMs do not compute {signature.key}"
    if signature.a is not signature.b and not row.has_mixed_fp8:
        able = ", ".join(arch for arch in served if architecture(arch).has_mixed_fp8)
        return (
            f"of quack, kernels that multiply fp8 of two types are offered for {able} alone, for "
            f"those of {arch} do not compile (here {signature.a.value} by {signature.b.value})"
        )
    if signature.a not in _OPERANDS or signature.out not in CUTE_TYPES:
        return (
            f"of quack, GEMMs of {_names_text(_OPERANDS)} into {_names_text(CUTE_TYPES)} are "
            f"offered (here {signature.a.value} into {signature.out.value})"
        )
    layouts = row.narrow_layouts
    if layouts and signature.a.is_fp8 and signature.layout.value not in layouts:
        allowed = ", ".join(layouts)
        return f"{signature.a.value} is multiplied in layout {allowed} alone on {arch}"
    return None


def _names_text(dtypes: Iterable[DType]) -> str:
    return ", ".join(dtype.value for dtype in dtypes)


_GATED = {
    None: "",
    GateForm.JOINED: "Gated",
    GateForm.KEPT: "GatedKept",
    GateForm.GRADIENT: "GateGradient",
    GateForm.GRADIENT_SUMS: "GateGradientSums",
    GateForm.UPS: "GateUps",
}
"""Kernel name parts by gate form."""


def _operator(design: Design, signature: Signature, arch: str) -> str:
    """Returns a design's name, unique for its signature and architecture."""
    m, n = design.tile
    family = family_of(arch)
    kind = (
        ("pingpong" if design.pingpong else "cooperative")
        if family.has_pingpong
        else family.scheduler
    )
    kind += "_dynamic" if design.dynamic else ""
    by_op = {
        Op.GROUPED_MM: "Grouped",
        Op.K_GROUPED_MM: "KGrouped",
        Op.GATHERED_GROUPED_MM: "GatheredGrouped",
    }
    kind_of_gemm = by_op.get(signature.op, "") + _GATED[signature.form]
    name = f"quack.Gemm{kind_of_gemm or 'Default'}{family.name}_{kind}"
    order = "parallel" if design.in_any_order else "serial"
    split = f"_split_k{design.splits}_{order}" if design.splits > 1 else ""
    return (
        f"{name}_cluster{design.cluster[0]}x{design.cluster[1]}x1"
        f"_tile{m}x{n}x{design.tile_k(signature.a)}{'_swap_ab' if design.swapped else ''}{split}"
    )
