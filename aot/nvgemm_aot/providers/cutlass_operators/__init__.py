"""Provider for NVIDIA's ``cutlass.operators``: CuTe-DSL GEMMs on Hopper and Blackwell.

Each `Family` knows its operators and how to call them; the provider lists and compiles them. May
import what `providers` may. Importing it is cheap: the compiler is imported when a method first
needs it.
"""

from __future__ import annotations

import functools
from typing import Any

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.errors import CompileError
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.support import unsupported

from ...targets import BuildTarget
from .. import cute_dsl
from ..base import (
    INTERFACE_VERSION,
    STATIC_PERSISTENT,
    Candidate,
    Enumeration,
    Rejection,
    RuntimeModel,
)
from ..heuristics.estimates import matmul_heuristics
from ..other_provider import other_provider
from . import toolchain
from .block_scaled import BlockScaled
from .dense import Dense
from .epilogue_source import WithEpilogue, other_provider_hint
from .family import Family
from .row_groups import Grouped

_DISTRIBUTIONS = (*cute_dsl.DISTRIBUTIONS, "nvidia-cutlass-operators")
"""Distributions whose versions shape the code."""

FAMILIES: tuple[Family, ...] = (Dense(), WithEpilogue(), BlockScaled(), Grouped())
"""All operator families. Add new ones here."""


class CutlassOperators:
    """Lists and compiles operators from ``cutlass.operators``."""

    interface = INTERFACE_VERSION
    name = "cutlass_operators"
    recipe = cute_dsl.recipe("1")

    def __init__(self) -> None:
        self._last: tuple[Candidate, str, Any] | None = None

    def toolchain(self) -> dict[str, str]:
        """Returns the compiler distributions' versions; see `Provider.toolchain`."""
        return cute_dsl.installed_versions(_DISTRIBUTIONS, "kernels")

    def prepare(self) -> None:
        """Imports the compiler and compiles an empty function once; see `Provider.prepare`.

        Removes the compiler's variables from this process's environment: they change the code, and
        cache keys do not cover them.
        """
        cute_dsl.set_environment()
        toolchain.import_operators()
        cute_dsl.warm_up()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Lists operators by their metadata; see `Provider.enumerate`."""
        reason = unsupported(signature)
        family = _family_of(signature)
        if reason is not None or family is None:
            if reason is None:
                other = other_provider(signature, target.target.arch)
                reason = f"no operator computes {signature.key}{other_provider_hint(other)}"
            return Enumeration(absence=reason)
        candidates, rejections = [], []
        absence: str | None = family.absence(signature, target)
        for operator in _operators(signature, target.target.arch).values():
            kind = type(operator).__name__
            if kind in family.operators:
                absence = None
            reason = _outdated_reason(operator, target)
            if reason is None and kind not in family.operators:
                reason = family.unknown_class_reason(kind)
            reason = reason or family.unfit_reason(operator, signature)
            if reason is None:
                candidates.append(self._candidate(operator, signature, family))
            else:
                rejections.append(
                    Rejection(operator=operator.metadata.operator_name, reason=reason)
                )
        return Enumeration(
            candidates=tuple(candidates), rejections=tuple(rejections), absence=absence
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """Returns NvMatmulHeuristics' model for the device; see `Provider.runtime_model`."""
        return matmul_heuristics(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compiles one operator to an object; see `Provider.compile`."""
        arch = target.target.arch
        try:
            cute_dsl.warm_up()
            return cute_dsl.export_object(self._compiled(candidate, target), target.target.platform)
        except (OSError, CompileError):
            raise
        except Exception as error:  # compiler passes may raise anything
            raise CompileError(
                f"{candidate.operator} for {arch}: {cute_dsl.first_line(error)}"
            ) from error

    def _compiled(self, candidate: Candidate, target: BuildTarget) -> Any:
        """Compiles an operator. Caches the last result, for export to another platform.

        Raises:
            CompileError: If the operator queries cluster sizes that its cache key lacks.
        """
        arch, signature = target.target.arch, candidate.signature
        if self._last is not None and self._last[:2] == (candidate, arch):
            return self._last[2]
        operator = _operators(signature, arch)[candidate.operator]
        with toolchain.hardware_facts(target.device) as queried:
            artifact = _require_family(signature).compile(
                operator, _sample_arguments(signature), arch.removeprefix("sm_")
            )
        unexpected = sorted(queried - set(candidate.cluster_sizes))
        if unexpected:
            raise CompileError(
                f"{candidate.operator} for {arch}: asked for the capacity of clusters of "
                f"{unexpected}, declared {candidate.cluster_sizes}: "
                "this provider does not know the operator well enough to cache it"
            )
        self._last = candidate, arch, artifact.compiled_obj
        return artifact.compiled_obj

    def _candidate(self, operator: Any, signature: Signature, family: Family) -> Candidate:
        metadata = operator.metadata
        design = family.design(metadata)
        constraints = (metadata.operands.A, metadata.operands.B, metadata.operands.out)
        workspace = operator.get_workspace_size(_sample_arguments(signature))
        parameters = list(family.parameters(signature))
        if workspace.size_bytes:
            parameters.insert(parameters.index("stream"), "workspace")
        return Candidate(
            provider=self.name,
            operator=metadata.operator_name,
            signature=signature,
            design=design,
            cluster_sizes=_cluster_sizes(design),
            block_shape=family.block_shape(metadata, design),
            preference=_preference(design),
            alignment_bytes=max(operand.ptr_alignment_bytes for operand in constraints),
            workspace_bytes=workspace.size_bytes,
            calling_convention=f"tvm_ffi:{cute_dsl.FUNCTION_NAME}({','.join(parameters)})",
            added_code=family.added_code(operator, signature),
        )


@functools.cache
def _operators(signature: Signature, arch: str) -> dict[str, Any]:
    """Returns a signature's operators by name, in the library's order."""
    operators = toolchain.import_operators().get_operators(
        args=_sample_arguments(signature), target_sm=arch.removeprefix("sm_")
    )
    return {operator.metadata.operator_name: operator for operator in operators}


def _outdated_reason(operator: Any, target: BuildTarget) -> str | None:
    """Returns the reason if an operator is too old for a target, else None."""
    native = target.target.capability[0] * 10
    designed_for = operator.metadata.operator_class.designed_for_min_cc
    if designed_for < native:
        return f"designed for sm_{designed_for}: it does not use the tensor cores of sm_{native}"
    return None


def _cluster_sizes(design: KernelDesign) -> tuple[int, ...]:
    if design.scheduler != STATIC_PERSISTENT:
        return ()
    shapes = [design.cluster, *([design.fallback_cluster] if design.fallback_cluster else [])]
    return tuple(sorted({m * n for m, n in shapes}))


def _preference(design: KernelDesign) -> int:
    """Returns the order among schedulers.

    Dynamic ones balance uneven waves; fallback clusters cost a little.
    """
    return 2 * (design.scheduler == STATIC_PERSISTENT) + (design.fallback_cluster is not None)


@functools.cache
def _sample_arguments(signature: Signature) -> Any:
    """Builds the sample arguments to list and compile a signature's operators."""
    toolchain.import_operators()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return _require_family(signature).arguments(signature)


def _family_of(signature: Signature) -> Family | None:
    if signature.is_gated:
        return None  # their epilogue language has no column pairs
    return next((family for family in FAMILIES if family.serves(signature)), None)


def _require_family(signature: Signature) -> Family:
    family = _family_of(signature)
    assert family is not None  # otherwise `CutlassOperators.enumerate` lists no candidate
    return family
