"""Rules of a manifest that hold between values: what must come together, and what must not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.problem import DType, Op
from nvgemm_runtime.support import OUTS

from .device import profile_names
from .manifest_schema import (
    ARCHITECTURES,
    INPUT_DTYPES,
    OUT_DTYPES,
    SIZE_KEYS,
    SIZE_WAYS,
    allowed_keys,
)
from .manifest_wording import meant_keys
from .targets import build_target
from .yaml_nodes import Mistake
from .yaml_source import Location, Source

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
    """Find what single values do not show: what must come together, and how much it makes."""
    gemms = source.data.get("gemms")
    defaults = source.data.get("defaults")
    defaults = defaults if isinstance(defaults, dict) else {}
    misspelt_defaults = _misspelt(defaults, ("defaults",))
    total = 0
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
        if op == Op.BMM.value and "batch" not in gemm.keys() | misspelt:
            text = "found no key 'batch', which bmm requires; add the number of matrices"
            yield source.mistake(location, text)
        if op == Op.MM.value and "batch" in gemm:
            text = "found key 'batch' with op mm; allowed: with op bmm only; add 'op: bmm'?"
            yield source.mistake((*location, "batch"), text, at_key=True)
        yield from _out_mistakes(source, location, gemm, defaults)
        here = _count_problems({**defaults, **gemm})
        if total <= MAX_PROBLEMS < total + here:
            yield source.mistake(
                location,
                f"found {total + here} problems up to here, {here} of them in this entry; allowed: "
                f"at most {MAX_PROBLEMS} in a manifest; shorten its lists or split the manifest",
            )
        total += here


def _out_mistakes(
    source: Source, location: Location, gemm: dict[str, Any], defaults: dict[str, Any]
) -> Iterator[Mistake]:
    """Find results that no kernel for the inputs can have."""
    out_place, outs = _listed("out", gemm, defaults, location)
    dtype_place, dtypes = _listed("dtype", gemm, defaults, location)
    # The mistake stands where this gemm departs from the defaults.
    at_dtype = out_place == ("defaults",) != dtype_place
    # What does not exist has its line already. Each of one side meets the distinct of the other,
    # since the product of two long lists may be endless.
    others = [dtype for dtype in DType if dtype.value in (outs if at_dtype else dtypes)]
    for index, own in enumerate(dtypes if at_dtype else outs):
        for other in others:
            dtype, out = (own, other.value) if at_dtype else (other.value, own)
            known = dtype in INPUT_DTYPES and out in OUT_DTYPES
            if not known or DType(out) in OUTS[DType(dtype)]:
                continue
            allowed = ", ".join(choice.value for choice in OUTS[DType(dtype)])
            if at_dtype:
                text = f"found {dtype!r} with out {out!r} of 'defaults'"
                advice = f"allowed out with {dtype}: {allowed}; give this gemm an 'out' of its own"
                yield source.mistake((*dtype_place, "dtype", index), f"{text}; {advice}")
            else:
                text = f"found {out!r} with dtype {dtype!r}; allowed with it: {allowed}"
                yield source.mistake((*out_place, "out", index), text)


def _listed(
    key: str, gemm: dict[str, Any], defaults: dict[str, Any], location: Location
) -> tuple[Location, list[Any]]:
    """Find the values of a key that count for a gemm, after the location of their mapping."""
    place, fields = (location, gemm) if key in gemm else (("defaults",), defaults)
    value = fields.get(key, [])
    return place, value if isinstance(value, list) else [value]


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


def _count_problems(fields: dict[str, Any]) -> int:
    factors = ("dtype", "out", "layout", "batch", *SIZE_KEYS)
    given = [fields[key] for key in factors if key in fields]
    return math.prod(len(value) for value in given if isinstance(value, list))
