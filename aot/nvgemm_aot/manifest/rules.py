"""Checks rules between manifest values: required and forbidden combinations.

`nvgemm_runtime.gemm.support` knows which signatures have kernels; this module locates mistakes in
the file.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, Epilogue
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Signature
from nvgemm_runtime.gemm.support import unsupported
from nvgemm_runtime.gemm.target import CUDA_VERSIONS, PLATFORMS, Target
from nvgemm_runtime.gemm.types import ScaleRecipe

from ..targets import build_targets
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
from .source import Location, Mistake, Source

MAX_PROBLEMS = 100_000
"""Largest number of problems in a manifest, before duplicates merge."""


def find_target_mistakes(source: Source) -> Iterator[Mistake]:
    """Finds devices that do not fit their target, and conflicting entries for one target."""
    first: dict[Target, tuple[int, list[str]]] = {}
    for index, entry in enumerate(_entries(source, "targets")):
        fields = entry if isinstance(entry, dict) else {"arch": entry}
        arch, device, devices = (fields.get(key) for key in ("arch", "device", "devices"))
        platform, cuda = fields.get("platform"), fields.get("cuda", Target.cuda)
        key = "device" if devices is None else "devices"
        location: Location = ("targets", index, key)
        if device is not None and devices is not None:
            text = "found keys 'device' and 'devices'; allowed: one of them; list all in 'devices'"
            yield source.mistake(location, text, at_key=True)
            continue
        named = devices if isinstance(devices, list) else [device] if device is not None else []
        known = (
            (arch, ARCHITECTURES),
            *((device, profile_names()) for device in named),
            (platform, (None, *PLATFORMS)),
            (cuda, CUDA_VERSIONS),
        )
        is_list = devices is None or (devices == named and devices)
        if any(value not in values for value, values in known) or not is_list:
            continue  # the schema refuses it
        assert isinstance(arch, str)  # from `ARCHITECTURES`
        repeated = next(
            (position for position, device in enumerate(named) if device in named[:position]), None
        )
        if repeated is not None:
            text = f"found {named[repeated]!r} again; allowed: each device once; remove it"
            yield source.mistake((*location, repeated), text)
            continue
        try:
            resolved = build_targets(arch, named, platform=platform, cuda=cuda)
        except TargetError as error:
            yield source.mistake(location, f"found {', '.join(map(repr, named))}; {error}")
            continue
        target, names = resolved[0].target, [build_target.device.name for build_target in resolved]
        earlier, earlier_names = first.setdefault(target, (index, names))
        if names != earlier_names:
            together = ", ".join(dict.fromkeys([*earlier_names, *names]))
            yield source.mistake(
                location,
                f"found {_devices_text(names)} for {target.key}, which targets[{earlier}] builds "
                f"for {_devices_text(earlier_names)}; allowed: one entry per "
                f"target; to rank for all of them: devices: [{together}]",
            )


def _devices_text(names: Sequence[str]) -> str:
    return f"device{'s' * (len(names) > 1)} {', '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class _Values:
    """A gemm key's effective values and their location in the file."""

    location: Location
    listed: tuple[Any, ...]


class GemmRules:
    """Checks each ``gemms`` entry and expands it into signatures.

    Attributes:
        signatures: By entry index, all combinations of the lists' known values.
        mistakes: Broken rules.
    """

    def __init__(self, source: Source) -> None:
        self.signatures: list[list[Signature]] = []
        self.mistakes: list[Mistake] = []
        self._source = source
        self._blamed: set[Location] = set()
        defaults = source.data.get("defaults")
        self._defaults = defaults if isinstance(defaults, dict) else {}
        misspelt_defaults = _misspelt(self._defaults, ("defaults",))
        for index, gemm in enumerate(_entries(source, "gemms")):
            location: Location = ("gemms", index)
            if not isinstance(gemm, dict):
                self.signatures.append([])
                continue
            values = {key: self._values(key, gemm, location) for key in _CHOICES}
            signatures = list(_expand_signatures(values))
            self.signatures.append(signatures)
            # A misspelt key already has a mistake, so its intended key is not reported as missing.
            self._check_keys(gemm, location, _misspelt(gemm, location) | misspelt_defaults)
            self._check_extents(gemm, location, values["dtype"].listed, values["epilogue"].listed)
            for signature in dict.fromkeys(signatures):
                reason = unsupported(signature)
                if reason is not None:
                    self._blame(signature, reason, values, location)

    def _add(self, location: Location, text: str, *, at_key: bool = False) -> None:
        self.mistakes.append(self._source.mistake(location, text, at_key=at_key))

    def _values(self, key: str, gemm: dict[str, Any], location: Location) -> _Values:
        if key not in gemm:
            values = _as_list(self._defaults.get(key, []))
            return _Values(location=("defaults", key), listed=tuple(values))
        return _Values(location=(*location, key), listed=tuple(_as_list(gemm[key])))

    def _check_keys(self, gemm: dict[str, Any], location: Location, misspelt: set[str]) -> None:
        if "dtype" not in gemm.keys() | self._defaults.keys() | misspelt:
            text = "found no key 'dtype', which is required here or under 'defaults'"
            self._add(location, f"{text}; allowed: {', '.join(INPUT_DTYPES)}")
        size_keys = tuple(key for key in SIZE_KEYS if key in gemm)
        if size_keys not in SIZE_WAYS and misspelt.isdisjoint(SIZE_KEYS):
            self._add(location, _explain_sizes(size_keys))
        op = gemm.get("op", self._defaults.get("op", Op.MM.value))
        if op == Op.GATHERED_MM.value and "dtype_b" in gemm:
            text = f"found key 'dtype_b' with op {op}; allowed: dtype only, which is B's"
            self._add((*location, "dtype_b"), text, at_key=True)
        for key, (counted, *owners) in _COUNTS.items():
            if op in owners and key not in gemm.keys() | misspelt:
                text = f"found no key {key!r}, which {op} requires; add the number of {counted}"
                self._add(location, text)
            if key in gemm and op not in owners and op in [operation.value for operation in Op]:
                text = (
                    f"found key {key!r} with op {op}; allowed: with op {' or '.join(owners)} only"
                )
                self._add((*location, key), text, at_key=True)

    def _check_extents(
        self,
        gemm: dict[str, Any],
        location: Location,
        dtypes: tuple[Any, ...],
        epilogues: tuple[Any, ...],
    ) -> None:
        """Finds a k that splits a packed type's element, and an odd n with a gate."""
        packed = [
            member
            for member in map(DType, INPUT_DTYPES)
            if member.packed > 1 and member.value in dtypes
        ]
        paired = [
            member
            for member in ALL_EPILOGUES
            if member.form is not None and member.form.has_pairs and member.name in epilogues
        ]
        rules = [
            *(("k", f"dtype {d.value!r}", d.packed, "k counts values, not bytes") for d in packed),
            *(("n", f"epilogue {e.name!r}", 2, "n counts gates and ups") for e in paired),
        ]
        for axis, condition, multiple, why in rules:
            for suffix, extent in _extents(gemm, axis):
                if type(extent) is int and extent % multiple:
                    self._add(
                        (*location, *suffix),
                        f"found {extent}; allowed with {condition}: "
                        f"a multiple of {multiple}; {why}",
                    )

    def _blame(
        self, signature: Signature, reason: str, values: Mapping[str, _Values], location: Location
    ) -> None:
        """Reports an unsupported signature at the first key that could be changed to fix it.

        If no single key fixes it, ``dtype`` is blamed if the reason also holds for equal types,
        else ``dtype_b``.
        """
        for key, choices in _CHOICES.items():
            field = _field(signature, key)
            right = [c for c in choices if unsupported(replace(signature, **{field: c})) is None]
            if right and values[key].listed:
                break
        else:
            alike = replace(signature, b=signature.a)
            is_of_a = signature.op is Op.GATHERED_MM or unsupported(alike) == reason
            key = "dtype" if is_of_a else "dtype_b"
        value = _spelling(getattr(signature, _field(signature, key)))
        blamed = (*values[key].location, values[key].listed.index(value))
        observed = f"found {value!r}"
        if blamed[0] == "defaults" and any(
            entry.location[0] == "gemms" for entry in values.values()
        ):
            blamed, observed = location, f"found {value!r} of 'defaults' for {key}"
        if blamed not in self._blamed:
            self._blamed.add(blamed)
            allowed = f"; allowed here: {', '.join(map(_spelling, right))}" if right else ""
            self._add(blamed, f"{observed}; {reason}{allowed}")


def _field(signature: Signature, key: str) -> str:
    """Returns the signature field that a gemm key sets."""
    if key == "dtype":
        return "b" if signature.op is Op.GATHERED_MM else "a"
    return "b" if key == "dtype_b" else key


_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype_b": tuple(map(DType, INPUT_DTYPES)),
    "out": tuple(map(DType, OUT_DTYPES)),
    "epilogue": (None, *ALL_EPILOGUES),
    "layout": tuple(Layout),
    "scales": (None, *ScaleRecipe),
    "op": tuple(Op),
    "dtype": (),
}
"""Possible field values for each gemm key that shapes the signature. A's dtype comes last, because
it is blamed if no other key helps."""

_COUNTS = {
    "batch": ("matrices", Op.BMM.value),
    "groups": ("groups", *(op.value for op in Op if op.has_groups)),
}
"""Counted items and permitted operations for each count key."""


def _entries(source: Source, key: str) -> list[Any]:
    value = source.data.get(key)
    return value if isinstance(value, list) else []


def _extents(gemm: Mapping[str, Any], axis: str) -> Iterator[tuple[Location, Any]]:
    """Yields an entry's values for n or k, with their locations."""
    for index, extent in enumerate(_as_list(gemm.get(axis, []))):
        yield (axis, index), extent
    for key in ("nk", "mnk"):
        for index, sizes in enumerate(_as_list(gemm.get(key, []))):
            if isinstance(sizes, list) and len(sizes) == len(key):
                yield (key, index, key.index(axis)), sizes[key.index(axis)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _spelling(choice: enum.Enum | Epilogue | None) -> str:
    if isinstance(choice, Epilogue):
        return choice.name
    return NONE if choice is None else str(choice.value)


def _expand_signatures(values: Mapping[str, _Values]) -> Iterator[Signature]:
    """Expands an entry's lists into signatures, without unknown values."""

    def known(key: str, allowed: tuple[str, ...], usual: str = NONE) -> list[str]:
        return [value for value in values[key].listed or (usual,) if value in allowed]

    usual_layout = {Op.GATHERED_MM.value: Layout.TT.value}
    for op, dtype in itertools.product(
        known("op", tuple(op.value for op in Op), Op.MM.value),
        map(DType, known("dtype", INPUT_DTYPES)),
    ):
        is_gathered = op == Op.GATHERED_MM.value
        a = DType.FP32 if is_gathered else dtype
        for layout, b, out, recipe, epilogue in itertools.product(
            known("layout", LAYOUTS, usual_layout.get(op, Layout.TN.value)),
            [dtype] if is_gathered else map(DType, known("dtype_b", INPUT_DTYPES, dtype.value)),
            known("out", OUT_DTYPES, dtype.usual_out.value),
            known("scales", SCALES),
            known("epilogue", EPILOGUES),
        ):
            yield Signature(
                op=Op(op),
                layout=Layout(layout),
                a=a,
                b=b,
                accumulator=a.accumulator,
                out=DType(out),
                scales=None if recipe == NONE else ScaleRecipe(recipe),
                epilogue=None if epilogue == NONE else Epilogue.parse(epilogue),
            )


def _misspelt(fields: dict[str, Any], location: Location) -> set[str]:
    unknown = fields.keys() - set(allowed_keys(location))
    return {meant for key in unknown for meant in meant_keys(key, location)}


def _explain_sizes(keys: tuple[str, ...]) -> str:
    observed = f"found sizes {', '.join(keys)}" if keys else "found no sizes"
    allowed = " or ".join(f"'{', '.join(way)}'" for way in SIZE_WAYS)
    add = [[key for key in way if key not in keys] for way in SIZE_WAYS if {*way} > {*keys}]
    advice = " or ".join(" and ".join(missing) for missing in add)
    return f"{observed}; allowed: {allowed}" + (f"; add {advice}" if keys and add else "")


def find_excess(source: Source) -> Mistake | None:
    """Finds the entry that takes a manifest over `MAX_PROBLEMS`.

    Counts list lengths before any checks: checking a hundred thousand entries takes a minute, and
    wording their mistakes another.
    """
    defaults = source.data.get("defaults")
    shared = defaults if isinstance(defaults, dict) else {}
    total = 0
    for index, entry in enumerate(_entries(source, "gemms")):
        here = _count_problems({**shared, **(entry if isinstance(entry, dict) else {})})
        total += here
        if total > MAX_PROBLEMS:
            return source.mistake(
                ("gemms", index),
                f"found {total} problems up to here, {here} of them in this entry; "
                f"allowed: at most {MAX_PROBLEMS} in a manifest; shorten its lists or split the "
                "manifest",
            )
    return None


def _count_problems(fields: dict[str, Any]) -> int:
    factors = (*_CHOICES.keys() - {"op"}, "batch", "groups", *SIZE_KEYS)
    return math.prod(len(fields[key]) for key in factors if isinstance(fields.get(key), list))
