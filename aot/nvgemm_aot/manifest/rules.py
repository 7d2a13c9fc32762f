"""Rules of a GEMM entry, and the signatures that it stands for."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.epilogue import Epilogue
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.scales import ScaleRecipe
from nvgemm_runtime.gemm.support import OUTS, unsupported

from ..targets import build_target
from ..targets.profile import profile_names
from .messages import meant_keys
from .schema import (
    ARCHITECTURES,
    EPILOGUES,
    INPUT_DTYPES,
    LAYOUTS,
    NONE,
    OUT_DTYPES,
    SCALES,
    SIZE_KEYS,
    SIZE_WAYS,
    allowed_keys,
)
from .source import Location, Mistake, Source, mistake_at


def expand_signatures(
    *,
    op: str,
    layouts: Iterable[str],
    dtypes: Iterable[str],
    outs: Iterable[str] | None,
    scales: Iterable[str],
    epilogues: Iterable[str],
) -> Iterator[Signature]:
    """Make the signatures of an entry, from values that exist, spelt as manifests spell them.

    Args:
        op: The operation.
        layouts: Majors of A and B.
        dtypes: Types of A and B.
        outs: Types of the result; None for what is usual for each of ``dtypes``.
        scales: Scale recipes, or ``none``.
        epilogues: Epilogues, or ``none``.
    """
    named = None if outs is None else [DType(out) for out in outs]
    for layout, dtype in itertools.product(layouts, map(DType, dtypes)):
        for out, recipe, epilogue in itertools.product(
            [dtype.usual_out] if named is None else named, scales, epilogues
        ):
            yield Signature(
                op=Op(op),
                layout=Layout(layout),
                a=dtype,
                b=dtype,
                accumulator=dtype.accumulator,
                out=out,
                scales=None if recipe == NONE else ScaleRecipe(recipe),
                epilogue=None if epilogue == NONE else Epilogue(epilogue),
            )


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


MAX_PROBLEMS = 100_000
"""Most problems of one manifest, counted before duplicates merge."""


def find_target_mistakes(source: Source) -> Iterator[Mistake]:
    """Find a device that does not fit its architecture, and two devices for one."""
    first: dict[str, tuple[int, str]] = {}
    targets = source.data.get("targets")
    for index, entry in enumerate(targets if isinstance(targets, list) else []):
        fields = entry if isinstance(entry, dict) else {"arch": entry}
        arch, device = fields.get("arch"), fields.get("device")
        if arch not in ARCHITECTURES or device not in (None, *profile_names()):
            continue
        location: Location = ("targets", index, "device")
        try:
            name = build_target(arch, device).device.name
        except TargetError as error:
            yield source.mistake(location, f"found {device!r}; {error}")
            continue
        earlier, other = first.setdefault(arch, (index, name))
        if name != other:
            yield source.mistake(
                location,
                f"found device {name!r} for {arch}, which targets[{earlier}] builds for {other!r}; "
                "allowed: one device an architecture; build the other into a bundle of its own",
            )


def find_gemm_mistakes(source: Source) -> Iterator[Mistake]:
    """Find what single values do not show: what must come together."""
    gemms = source.data.get("gemms")
    defaults = source.data.get("defaults")
    defaults = defaults if isinstance(defaults, dict) else {}
    misspelt_defaults = _misspelt(defaults, ("defaults",))
    for index, gemm in enumerate(gemms if isinstance(gemms, list) else []):
        if not isinstance(gemm, dict):
            continue
        location: Location = ("gemms", index)
        # A misspelt key already has its line: what it stands for is not also missing.
        misspelt = _misspelt(gemm, location) | misspelt_defaults
        if "dtype" not in gemm.keys() | defaults.keys() | misspelt:
            text = "found no key 'dtype', which is required here or under 'defaults'"
            yield source.mistake(location, f"{text}; allowed: {', '.join(INPUT_DTYPES)}")
        if misspelt.isdisjoint(SIZE_KEYS) and (problem := _size_problem(gemm)):
            yield source.mistake(location, problem)
        op = gemm.get("op", defaults.get("op", Op.MM.value))
        yield from _count_mistakes(source, location, op, set(gemm), misspelt)
        yield from find_combination_mistakes(source, location, gemm, defaults)


_COUNTS = {Op.BMM: ("batch", "matrices"), Op.GROUPED_MM: ("groups", "groups")}
"""The operations that have a number of something, its key, and what it counts."""


def _count_mistakes(
    source: Source, location: Location, op: Any, given: set[str], misspelt: set[str]
) -> Iterator[Mistake]:
    """Find a batch or groups that are missing, or that the operation does not have."""
    for owner, (key, counted) in _COUNTS.items():
        if op == owner.value and key not in given | misspelt:
            text = f"found no key {key!r}, which {op} requires; add the number of {counted}"
            yield source.mistake(location, text)
        if op in _OPS and op != owner.value and key in given:
            advice = f"write 'op: {owner.value}' or leave it out"
            if "op" not in given:
                advice = f"add 'op: {owner.value}'?"
            text = f"found key {key!r} with op {op}; allowed: with op {owner.value} only; {advice}"
            yield source.mistake((*location, key), text, at_key=True)


_OPS = tuple(op.value for op in Op)


def _misspelt(fields: dict[str, Any], location: Location) -> set[str]:
    unknown = fields.keys() - set(allowed_keys(location))
    return {meant for key in unknown for meant in meant_keys(key, location)}


def _size_problem(gemm: dict[str, Any]) -> str | None:
    given = tuple(key for key in SIZE_KEYS if key in gemm)
    if given in SIZE_WAYS:
        return None
    found = f"found sizes {', '.join(given)}" if given else "found no sizes"
    allowed = " or ".join(f"'{', '.join(way)}'" for way in SIZE_WAYS)
    add = [[key for key in way if key not in given] for way in SIZE_WAYS if {*way} > {*given}]
    drop = [[key for key in given if key not in way] for way in SIZE_WAYS if {*way} < {*given}]
    verb, options = ("add", add) if add else ("leave out", drop)
    advice = " or ".join(" and ".join(option) for option in options)
    return f"{found}; allowed: {allowed}" + (f"; {verb} {advice}" if advice else "")


def find_excess(root: yaml.Node | None) -> Mistake | None:
    """Find the entry with which a manifest declares more than `MAX_PROBLEMS`.

    The lengths of lists tell, before anything of them is looked at: a file of a hundred thousand
    entries takes a minute to check, and as long again to say what is wrong with each.
    """
    gemms = _nodes(root).get("gemms")
    if not isinstance(gemms, yaml.SequenceNode):
        return None
    defaults = _nodes(_nodes(root).get("defaults"))
    total = 0
    for index, entry in enumerate(gemms.value):
        here = _count_problems({**defaults, **_nodes(entry)})
        total += here
        if total > MAX_PROBLEMS:
            return mistake_at(
                entry.start_mark,
                f"gemms[{index}]: found {total} problems up to here, {here} of them in this entry; "
                f"allowed: at most {MAX_PROBLEMS} in a manifest; shorten its lists or split the "
                "manifest",
            )
    return None


def _nodes(node: yaml.Node | None) -> dict[str, yaml.Node]:
    """The values of a mapping, by those of its keys that are text; none of anything else."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}


def _count_problems(fields: dict[str, yaml.Node]) -> int:
    factors = ("dtype", "out", "layout", "scales", "epilogue", "batch", "groups", *SIZE_KEYS)
    given = (fields[key] for key in factors if key in fields)
    return math.prod(len(node.value) for node in given if isinstance(node, yaml.SequenceNode))
