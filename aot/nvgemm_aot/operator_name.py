"""What an operator's name says about its kernel, for the providers whose names say something."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nvgemm_runtime.format import Kernel
from nvgemm_runtime.problem import DType

from .device_elf import Cubin
from .gap import Check, Gap

NAMING_PROVIDERS = frozenset({"cutlass_operators"})
"""Providers whose operator names this module reads."""

_NAME = re.compile(
    r"cutedsl\.(?P<family>[A-Za-z0-9]+)Operator(?:_sm100)?"
    r"_(?P<layout>[tn]{2})t_A(?P<a>[A-Z0-9a-z]+)_B(?P<b>[A-Z0-9a-z]+)"
    r"_out(?P<out>[A-Z0-9a-z]+)_acc(?P<accumulator>[A-Z0-9a-z]+)"
    r"(?:_(?P<ctas>[12])cta)?"
    r"(?:_(?:cluster|preferred)(?P<cluster>[0-9]+x[0-9]+)x1)?(?:_fallback(?P<fallback>[0-9]+x[0-9]+)x1)?"
    r"_tile(?P<tile>[0-9]+x[0-9]+x[0-9]+)"
    r"(?:_scheduler_?(?P<scheduler>CLC|clc|STATIC_PERSISTENT|static_persistent))?(?:_tma_store)?"
)
"""Names of cutlass-operators 0.3.0, e.g. ``cutedsl.PersistentDenseGemmOperator_sm100_tnt_ABFloat16_
BBFloat16_outBFloat16_accFloat32_2cta_cluster4x1x1_tile256x256x64_schedulerCLC_tma_store``."""

_FAMILIES: dict[str, str | None] = {
    "PersistentDenseGemm": None,
    "PersistentDenseGemmPreferredCluster": None,
    "Sm90StaticPersistentGemm": "static_persistent",
    "TgvGemm": "one_tile",
}
"""Families that the provider offers, with the scheduler of those whose names do not state one."""

_DTYPES = {
    DType.FP32: "Float32",
    DType.FP16: "Float16",
    DType.BF16: "BFloat16",
    DType.FP8_E4M3: "Float8E4M3FN",
    DType.FP8_E5M2: "Float8E5M2",
    DType.INT32: "Int32",
    DType.INT8: "Int8",
    DType.UINT8: "Uint8",
}


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
    scheduler = _FAMILIES[match["family"]] or (match["scheduler"] or "").lower()
    signature, design = kernel.signature, kernel.design
    tile_m, tile_n, tile_k = design.tile
    if scheduler == "one_tile":  # the name gives the tile of the transposed problem
        tile_m, tile_n = tile_n, tile_m
    fallback = design.fallback_cluster
    pairs = {
        "layout": (match["layout"], signature.layout.value),
        "a": (match["a"], _DTYPES[signature.a]),
        "b": (match["b"], _DTYPES[signature.b]),
        "out": (match["out"], _DTYPES[signature.out]),
        "accumulator": (match["accumulator"], _DTYPES[signature.accumulator]),
        "ctas_per_tile": (match["ctas"] or "1", str(design.ctas_per_tile)),
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


def _extents(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))
