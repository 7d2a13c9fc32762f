"""What an operator's name says about its kernel, for the providers whose names say something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.problem import Op, Signature

from .cubin import Cubin
from .findings import Check, Gap
from .kernel_design import ONE_TILE, STATIC_PERSISTENT

NAMING_PROVIDERS = frozenset({"cutlass_operators"})
"""Providers whose operator names this module reads."""

_PLAIN, _EPILOGUE, _BLOCK_SCALED, _GROUPED = "plain", "epilogue", "block-scaled", "grouped"
"""Kinds of GEMM."""

_NAME = re.compile(
    r"cutedsl\.(?P<family>[A-Za-z0-9]+)Operator(?:_sm100)?"
    r"_(?P<layout>[tn]{2})t_A(?P<a>[A-Z0-9a-z]+)_B(?P<b>[A-Z0-9a-z]+)"
    r"_out(?P<out>[A-Z0-9a-z]+)"
    r"(?:_SFA(?P<scale_a>[A-Z0-9a-z]+)_SFB(?P<scale_b>[A-Z0-9a-z]+))?"
    r"_acc(?P<accumulator>[A-Z0-9a-z]+)"
    r"(?:_scaleScaleMode\.(?P<scale_mode>\w+?)_swizzleScaleSwizzleMode\.(?P<swizzle>\w+?))?"
    r"(?:_(?P<ctas>[12])cta)?"
    r"(?:_(?:cluster|preferred)(?P<cluster>[0-9]+x[0-9]+)x1)?(?:_fallback(?P<fallback>[0-9]+x[0-9]+)x1)?"
    r"_tile(?P<tile>[0-9]+x[0-9]+x[0-9]+)"
    r"(?:_scheduler_?(?P<scheduler>CLC|clc|STATIC_PERSISTENT|static_persistent))?(?:_tma_store)?"
)
"""Names of cutlass-operators 0.3.0, e.g. ``cutedsl.PersistentDenseGemmOperator_sm100_tnt_ABFloat16_
BBFloat16_outBFloat16_accFloat32_2cta_cluster4x1x1_tile256x256x64_schedulerCLC_tma_store``."""


class _Family(NamedTuple):
    """What all operators of a family have in common."""

    scheduler: str | None = None
    """None where their names state one."""
    kind: str = _PLAIN


_FAMILIES = {
    "PersistentDenseGemm": _Family(),
    "PersistentDenseGemmPreferredCluster": _Family(),
    "Sm90StaticPersistentGemm": _Family(STATIC_PERSISTENT),
    "TgvGemm": _Family(ONE_TILE),
    "PersistentDenseGemmEFC": _Family(STATIC_PERSISTENT, _EPILOGUE),
    "PersistentDenseBlockScaledGemm": _Family(STATIC_PERSISTENT, _BLOCK_SCALED),
    "ContiguousOffset2D3DGemmDense": _Family(STATIC_PERSISTENT, _GROUPED),
}
"""Families that the provider offers. Which epilogue an operator has, its name does not say."""

_SWIZZLE = "Swizzle32x4x4"


def check_operator_name(kernel: Kernel, cubins: tuple[Cubin, ...]) -> Iterator[Gap]:
    """Check that signature and design of a kernel are those that its operator's name states.

    Device code shows the family, which decides between the schedulers static_persistent and
    one_tile: the class that generated it is part of its functions' names.

    Yields:
        What does not hold; nothing for a provider whose names this module does not read.
    """
    if kernel.provider not in NAMING_PROVIDERS:
        return
    match = _NAME.fullmatch(kernel.operator)
    if match is None or match["family"] not in _FAMILIES:
        yield Gap(
            check=Check.OPERATOR_NAME,
            message=f"{kernel.provider} has no operator called {kernel.operator!r}",
        )
        return
    for function in (function for cubin in cubins for function in cubin.kernels):
        if f"{match['family']}Kernel" not in function.name:
            yield Gap(
                check=Check.OPERATOR_NAME,
                message=f"the operator's name states {match['family']}, the device function is "
                f"called {function.name[:160]}",
            )
    family = _FAMILIES[match["family"]]
    scheduler = family.scheduler or (match["scheduler"] or "").lower()
    signature, design = kernel.signature, kernel.design
    tile_m, tile_n, tile_k = design.tile
    if scheduler == ONE_TILE:  # the name gives the tile of the transposed problem
        tile_m, tile_n = tile_n, tile_m
    ctas = match["ctas"] or "1"
    if family.kind == _BLOCK_SCALED and tile_m < 256:  # such names say 2, such kernels use 1
        ctas = "1"
    fallback = design.fallback_cluster
    pairs = {
        "kind": (family.kind, _kind(signature)),
        "layout": (match["layout"], signature.layout.value),
        "a": (match["a"], signature.a.row.cutlass_name),
        "b": (match["b"], signature.b.row.cutlass_name),
        "out": (match["out"], signature.out.row.cutlass_name),
        "accumulator": (match["accumulator"], signature.accumulator.row.cutlass_name),
        **_scales(match, signature),
        "ctas_per_tile": (ctas, str(design.ctas_per_tile)),
        "cluster": (match["cluster"] or "1x1", _extents(design.cluster)),
        "fallback_cluster": (
            match["fallback"] or "none",
            _extents(fallback) if fallback else "none",
        ),
        "tile": (match["tile"], _extents((tile_m, tile_n, tile_k))),
        "scheduler": (scheduler, design.scheduler),
    }
    for field, (stated, entry) in pairs.items():
        if stated != entry:
            yield Gap(
                check=Check.OPERATOR_NAME,
                message=f"the operator's name states {field} {stated}, its entry says {entry}",
            )


def _scales(match: re.Match[str], signature: Signature) -> dict[str, tuple[str, str]]:
    """What the name states of block scales, and what the entry says."""
    entry = dict.fromkeys(("scale_a", "scale_b", "scale_mode", "swizzle"), "none")
    if signature.scales is not None and signature.scales.is_swizzled:
        dtype = signature.scales.dtype.row.cutlass_name
        mode = f"Blockwise1x{signature.scales.block}"
        entry = {"scale_a": dtype, "scale_b": dtype, "scale_mode": mode, "swizzle": _SWIZZLE}
    return {field: (match[field] or "none", said) for field, said in entry.items()}


def _kind(signature: Signature) -> str:
    if signature.op is Op.GROUPED_MM:
        return _GROUPED
    if signature.scales is not None and signature.scales.is_swizzled:
        return _BLOCK_SCALED
    # Scales that are no blocks' are multiplied by in an epilogue.
    return _EPILOGUE if signature.scales or signature.epilogue else _PLAIN


def _extents(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))
