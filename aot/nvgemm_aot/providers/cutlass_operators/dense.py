"""Plain GEMMs: mm and bmm without scales, groups or epilogue."""

# ruff: noqa: D102 - `Family` documents the methods

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.errors import CompileError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.roles import extra_roles
from nvgemm_runtime.gemm.types import DType

from ...targets import BuildTarget
from ..base import CLC, ONE_TILE, STATIC_PERSISTENT
from ..other_provider import other_provider
from .epilogue_source import EFC_OPERATOR, other_provider_hint
from .family import Family
from .samples import sample_operands, sample_tensors
from .toolchain import import_operators

_SM90_OPERATOR = "Sm90StaticPersistentGemmOperator"
_TGV_OPERATOR = "TgvGemmOperator"
_PREFERRED_OPERATOR = "PersistentDenseGemmPreferredClusterOperator"

_SCHEDULERS = {
    "CLCDynamicPersistentTileSchedulerMetadata": CLC,
    "StaticPersistentTileSchedulerMetadata": STATIC_PERSISTENT,
}


class Dense(Family):
    """Plain GEMMs on Hopper and Blackwell."""

    operators = (
        "PersistentDenseGemmOperator",
        _PREFERRED_OPERATOR,
        _SM90_OPERATOR,
        _TGV_OPERATOR,
    )

    def serves(self, signature: Signature) -> bool:
        return signature.op in (Op.MM, Op.BMM) and not extra_roles(signature)

    def parameters(self, signature: Signature) -> tuple[str, ...]:
        return ("a", "b", "out", "stream")

    def arguments(self, signature: Signature) -> Any:
        operands = sample_operands(signature, sample_tensors(signature))
        return import_operators().GemmArguments(**operands)

    def absence(self, signature: Signature, target: BuildTarget) -> str:
        arch = target.target.arch
        by = f" by {signature.b.value}" if signature.b is not signature.a else ""
        hint = other_provider_hint(other_provider(signature, arch))
        return (
            f"{arch} has no operator that multiplies {signature.a.value}{by} into "
            f"{signature.out.value}{hint}"
        )

    def unfit_reason(self, operator: Any, signature: Signature) -> str | None:
        k_major = signature.layout.a_row_major and not signature.layout.b_row_major
        if type(operator).__name__ == _SM90_OPERATOR and signature.a.bits == 8 and not k_major:
            return "WGMMA reads 8-bit operands only along k (layout tn): it does not compile"
        if (
            type(operator).__name__ == _PREFERRED_OPERATOR
            and _scheduler(operator.metadata) == STATIC_PERSISTENT
        ):
            # `_compute_preferred_cluster_grid` in cutlass.operators 0.3.0 rounds the number of
            # clusters down. The library's own guard is in Python, which launchers do not run.
            return (
                "it launches no block, which the driver refuses, for problems that are smaller "
                "than its preferred cluster"
            )
        return None

    def compile(self, operator: Any, arguments: Any, target_sm: str) -> Any:
        _keep_unsigned(operator)
        with _free_behind_readers() if _is_tgv(operator.metadata) else contextlib.nullcontext():
            return super().compile(operator, arguments, target_sm)

    def added_code(self, operator: Any, signature: Signature) -> str:
        if _is_tgv(operator.metadata):
            return "# tensor memory freed behind its readers\n"
        return "# unsigned\n" if signature.a is DType.UINT8 else ""

    def unknown_class_reason(self, kind: str) -> str:
        if kind == EFC_OPERATOR:
            return (
                "its epilogue fusion has nothing to fuse; the plain operator has the same main loop"
            )
        return super().unknown_class_reason(kind)

    def design(self, metadata: Any) -> KernelDesign:
        design = super().design(metadata)
        tile_m, tile_n, tile_k = design.tile
        fallback = getattr(metadata.design, "fallback_cluster_shape", None)
        scheduler = _scheduler(metadata)
        return replace(
            design,
            # Operators with this scheduler compute the transposed problem.
            tile=(tile_n, tile_m, tile_k) if scheduler == ONE_TILE else design.tile,
            fallback_cluster=None if fallback is None else (fallback[0], fallback[1]),
            scheduler=scheduler,
        )


@contextlib.contextmanager
def _free_behind_readers() -> Iterator[None]:
    """Makes TGV's MMA warp free tensor memory behind the warps that read it, for any k.

    Phase 0 of one memory barrier means that tensor memory is allocated, phase 1 that it has been
    read. The library's MMA warp arrives for both and waits for phase 1 alone. While a warp of the
    epilogue has not arrived for phase 0, a wait for phase 1 passes at once: the phase before phase
    0 counts as complete. The added wait for phase 0 lies between the two arrivals.
    """
    from cutlass.cute import arch

    arrive, relinquish = arch.mbarrier_arrive, arch.relinquish_tmem_alloc_permit
    barriers: list[Any] = []
    waits = 0

    def noted_arrive(barrier: Any, *arguments: Any, **named: Any) -> Any:
        barriers.append(barrier)
        return arrive(barrier, *arguments, **named)

    def relinquish_and_wait(*arguments: Any, **named: Any) -> None:
        # The library calls it next to the arrival for phase 0, and nowhere else.
        nonlocal waits
        relinquish(*arguments, **named)
        if barriers:
            arch.mbarrier_wait(barriers[-1], 0)
            waits += 1

    arch.mbarrier_arrive, arch.relinquish_tmem_alloc_permit = noted_arrive, relinquish_and_wait
    try:
        yield
    finally:
        arch.mbarrier_arrive, arch.relinquish_tmem_alloc_permit = arrive, relinquish
    if waits != 1:
        raise CompileError(
            f"its tensor memory is relinquished {waits} times behind an arrival, must be 1: this "
            "cutlass.operators is unknown; install the version in constraints.txt"
        )


def _keep_unsigned(operator: Any) -> None:
    """Makes an operator multiply unsigned operands as unsigned.

    Left alone, a kernel reads its types from tensors that have lost their sign, and treats uint8 as
    int8: with cutlass-dsl 4.8.1, both kernels were equal to the byte.
    """
    import cutlass

    kernel, operands = operator.impl, operator.metadata.operands
    if operands.A.dtype is not cutlass.Uint8:
        return
    set_up = type(kernel)._setup_attributes

    def set_up_unsigned() -> Any:
        kernel.a_dtype, kernel.b_dtype = operands.A.dtype, operands.B.dtype
        kernel.c_dtype = operands.out.dtype
        return set_up(kernel)

    kernel._setup_attributes = set_up_unsigned


def _is_tgv(metadata: Any) -> bool:
    return bool(metadata.operator_class.__name__ == _TGV_OPERATOR)


def _scheduler(metadata: Any) -> str:
    kind = metadata.operator_class.__name__
    if kind == _SM90_OPERATOR:
        return STATIC_PERSISTENT
    if _is_tgv(metadata):
        return ONE_TILE
    return _SCHEDULERS[type(metadata.design.tile_scheduler).__name__]
