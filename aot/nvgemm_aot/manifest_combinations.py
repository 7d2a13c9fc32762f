"""Rules of a manifest about what goes together: types, results, scales, layouts and epilogues.

`nvgemm_runtime.support` says what does; here is where in a file a mistake stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nvgemm_runtime.epilogue import Epilogue
from nvgemm_runtime.problem import DType, Layout, Op, Signature
from nvgemm_runtime.scales import ScaleRecipe
from nvgemm_runtime.support import OUTS, unsupported

from .manifest_schema import EPILOGUES, INPUT_DTYPES, LAYOUTS, NONE, OUT_DTYPES, SCALES
from .yaml_nodes import Mistake
from .yaml_source import Location, Source


def usual_out(dtype: DType) -> DType:
    """The result's type where a manifest names none."""
    if dtype.is_integer:
        return DType.INT32
    return dtype if dtype in (DType.FP16, DType.BF16) else DType.BF16


@dataclass(frozen=True, kw_only=True)
class _Values:
    """The values of a key that count for a gemm, and where they stand."""

    place: Location
    given: tuple[Any, ...]


def find_combination_mistakes(
    source: Source, location: Location, gemm: dict[str, Any], defaults: dict[str, Any]
) -> Iterator[Mistake]:
    """Find what no kernel can compute, in one entry of ``gemms``."""
    values = {
        key: _values(key, gemm, defaults, location)
        for key in ("op", "layout", "dtype", "out", "scales", "epilogue")
    }
    yield from _out_mistakes(source, values)
    yield from _unsupported_mistakes(source, location, values)
    yield from _extent_mistakes(source, location, gemm, values["dtype"].given)


def _values(
    key: str, gemm: dict[str, Any], defaults: dict[str, Any], location: Location
) -> _Values:
    place, fields = (location, gemm) if key in gemm else (("defaults",), defaults)
    value = fields.get(key, [])
    given = value if isinstance(value, list) else [value]
    return _Values(place=(*place, key), given=tuple(given))


def _out_mistakes(source: Source, values: dict[str, _Values]) -> Iterator[Mistake]:
    """Find results that no kernel for the inputs can have."""
    outs, dtypes = values["out"], values["dtype"]
    # The mistake stands where this gemm departs from the defaults.
    at_dtype = outs.place[0] == "defaults" != dtypes.place[0]
    # What does not exist has its line already. Each of one side meets the distinct of the other,
    # since the product of two long lists may be endless.
    others = [dtype for dtype in DType if dtype.value in (outs if at_dtype else dtypes).given]
    for index, own in enumerate((dtypes if at_dtype else outs).given):
        for other in others:
            dtype, out = (own, other.value) if at_dtype else (other.value, own)
            known = dtype in INPUT_DTYPES and out in OUT_DTYPES
            if not known or DType(out) in OUTS[DType(dtype)]:
                continue
            allowed = ", ".join(choice.value for choice in OUTS[DType(dtype)])
            if at_dtype:
                text = f"found {dtype!r} with out {out!r} of 'defaults'"
                advice = f"allowed out with {dtype}: {allowed}; give this gemm an 'out' of its own"
                yield source.mistake((*dtypes.place, index), f"{text}; {advice}")
            else:
                text = f"found {out!r} with dtype {dtype!r}; allowed with it: {allowed}"
                yield source.mistake((*outs.place, index), text)


_BLAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("epilogue", {"epilogue": None}),
    ("layout", {"layout": Layout.TN}),
    ("scales", {"scales": None}),
    ("op", {"op": Op.MM}),
    ("out", {"out": DType.BF16}),
)
"""A key, and what would stand in a signature without it: where that makes the rest right, the
mistake is said to stand there. Otherwise it stands at the dtype."""


def _unsupported_mistakes(
    source: Source, location: Location, values: dict[str, _Values]
) -> Iterator[Mistake]:
    """Find what goes with none of the rest, each place once."""
    told: set[Location] = set()
    for signature in _signatures(values):
        reason = unsupported(signature)
        if reason is None or signature.out not in OUTS[signature.a]:  # the latter has its line
            continue
        key = next(
            (
                key
                for key, usual in _BLAMED
                if values[key].given and unsupported(replace(signature, **usual)) is None
            ),
            "dtype",
        )
        value = signature.a.value if key == "dtype" else getattr(signature, key).value
        place = values[key].place
        if place[0] == "defaults" and location[0] != "defaults":
            here = f"found {value!r} of 'defaults' for {key}"
            place = location
        else:
            here = f"found {value!r}"
            place = (*place, values[key].given.index(value))
        if place not in told:
            told.add(place)
            yield source.mistake(place, f"{here}; {reason}")


def _signatures(values: dict[str, _Values]) -> Iterator[Signature]:
    """What an entry stands for, of the values that exist, each once."""

    def known(key: str, allowed: tuple[str, ...], usual: str) -> list[str]:
        given = values[key].given or (usual,)
        return [value for value in allowed if value in given]

    ops = known("op", tuple(op.value for op in Op), Op.MM.value)
    layouts = known("layout", LAYOUTS, Layout.TN.value)
    dtypes = [DType(dtype) for dtype in known("dtype", INPUT_DTYPES, "")]
    scales = known("scales", SCALES, NONE)
    epilogues = known("epilogue", EPILOGUES, NONE)
    for op, layout, dtype, recipe, epilogue in itertools.product(
        ops, layouts, dtypes, scales, epilogues
    ):
        for out in known("out", OUT_DTYPES, usual_out(dtype).value):
            yield Signature(
                op=Op(op),
                layout=Layout(layout),
                a=dtype,
                b=dtype,
                accumulator=DType.INT32 if dtype.is_integer else DType.FP32,
                out=DType(out),
                scales=None if recipe == NONE else ScaleRecipe(recipe),
                epilogue=None if epilogue == NONE else Epilogue(epilogue),
            )


def _extent_mistakes(
    source: Source, location: Location, gemm: dict[str, Any], dtypes: tuple[Any, ...]
) -> Iterator[Mistake]:
    """Find a k that ends within an element of a type of which several share one."""
    packed = [DType(dtype) for dtype in INPUT_DTYPES if dtype in dtypes and DType(dtype).packed > 1]
    for dtype in packed:
        for place, k in _k_extents(gemm):
            if type(k) is int and k % dtype.packed:
                text = (
                    f"found {k}; allowed with dtype {dtype.value!r}: a multiple of {dtype.packed}; "
                    "k counts values, not bytes"
                )
                yield source.mistake((*location, *place), text)


def _k_extents(gemm: dict[str, Any]) -> Iterator[tuple[Location, Any]]:
    given = gemm.get("k", [])
    for index, k in enumerate(given if isinstance(given, list) else [given]):
        yield ("k", index), k
    for key in ("nk", "mnk"):
        given = gemm.get(key)
        for index, sizes in enumerate(given if isinstance(given, list) else []):
            if isinstance(sizes, list) and len(sizes) == len(key):
                yield (key, index, len(sizes) - 1), sizes[-1]
