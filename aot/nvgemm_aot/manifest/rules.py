"""Rules of a manifest that hold between values: what must come together, and what must not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import yaml

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.problem import Op

from ..targets import build_target
from ..targets.profile import profile_names
from .combinations import find_combination_mistakes
from .messages import meant_keys
from .schema import (
    ARCHITECTURES,
    INPUT_DTYPES,
    SIZE_KEYS,
    SIZE_WAYS,
    allowed_keys,
)
from .yaml_nodes import Mistake, place
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
            return place(
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
