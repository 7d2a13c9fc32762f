"""Rules of a manifest about what goes together: types, results, scales, layouts and epilogues.

`nvgemm_runtime.gemm.support` says what does; here is where in a file a mistake stands.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.support import OUTS, unsupported
from nvgemm_runtime.gemm.types import Epilogue, ScaleRecipe

from .schema import EPILOGUES, INPUT_DTYPES, LAYOUTS, NONE, OUT_DTYPES, SCALES
from .signatures import expand_signatures
from .yaml_nodes import Mistake
from .yaml_source import Location, Source


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


_CHOICES: dict[str, tuple[Any, ...]] = {
    "out": tuple(map(DType, OUT_DTYPES)),
    "epilogue": (None, *Epilogue),
    "layout": tuple(Layout),
    "scales": (None, *ScaleRecipe),
    "op": tuple(Op),
}
"""By key: what may stand in a signature's field of that name. A mistake is said to stand at the
first key of which another value makes all right. If there is none, it stands at the dtype."""


def _unsupported_mistakes(
    source: Source, location: Location, values: dict[str, _Values]
) -> Iterator[Mistake]:
    """Find what goes with none of the rest, each place once."""
    told: set[Location] = set()
    for signature in _signatures(values):
        reason = unsupported(signature)
        if reason is None or signature.out not in OUTS[signature.a]:  # the latter has its line
            continue
        key, allowed = _blame(signature, values)
        value = signature.a.value if key == "dtype" else _text(getattr(signature, key))
        advice = f"; allowed here: {', '.join(allowed)}" if allowed else ""
        place = values[key].place
        if place[0] == "defaults" and location[0] != "defaults":
            here = f"found {value!r} of 'defaults' for {key}"
            place = location
        else:
            here = f"found {value!r}"
            place = (*place, values[key].given.index(value))
        if place not in told:
            told.add(place)
            yield source.mistake(place, f"{here}; {reason}{advice}")


def _blame(signature: Signature, values: dict[str, _Values]) -> tuple[str, list[str]]:
    """The key at which an unsupported signature has its mistake, and what is allowed there."""
    for key, choices in _CHOICES.items():
        if not values[key].given:
            continue
        right = [c for c in choices if unsupported(replace(signature, **{key: c})) is None]
        if right:
            return key, [_text(choice) for choice in right]
    return "dtype", []


def _text(choice: enum.Enum | None) -> str:
    return NONE if choice is None else str(choice.value)


def _signatures(values: dict[str, _Values]) -> Iterator[Signature]:
    """What an entry stands for, of the values that exist, each once."""

    def known(key: str, allowed: tuple[str, ...], usual: str) -> list[str]:
        given = values[key].given or (usual,)
        return [value for value in allowed if value in given]

    for op in known("op", tuple(op.value for op in Op), Op.MM.value):
        yield from expand_signatures(
            op=op,
            layouts=known("layout", LAYOUTS, Layout.TN.value),
            dtypes=known("dtype", INPUT_DTYPES, ""),
            outs=known("out", OUT_DTYPES, "") if values["out"].given else None,
            scales=known("scales", SCALES, NONE),
            epilogues=known("epilogue", EPILOGUES, NONE),
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
