"""Finds faults in what a provider lists.

Each check yields faults, worded to follow the call: ``enumerate(...) listed ...``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import (
    MAX_KERNEL_ALIGNMENT_BYTES,
    MAX_TILE_BYTES,
    KernelDesign,
)
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.errors import one_line
from nvgemm_runtime.gemm.problem import MAX_EXTENT, Signature

from ...targets import BuildTarget
from ..base import (
    DYNAMIC_PERSISTENT,
    SCHEDULERS,
    STATIC_PERSISTENT,
    BlockShape,
    Candidate,
    Enumeration,
    Rejection,
)

EXACTLY = ", not a subclass"
"""Suffix in messages. Listed objects go to compiler processes and plans, which do not know
subclasses."""

MAX_OPERATOR_LENGTH = 300
_OPERATOR = re.compile(r"[!-~]+(?: [!-~]+)*")
"""Pattern for operator names: printable ASCII without outer blanks. Names go into headers, tables
and logs."""

_EXTENTS = f"1 to {MAX_EXTENT}"

MAX_CLUSTER_BLOCKS = 16
"""Largest number of thread blocks per cluster (CUDA C++ Programming Guide, thread block clusters).
"""

MAX_VERSION_LENGTH = 1000
"""Longest toolchain text, which is also the limit in rankings files."""

MAX_HEADER_INTEGER = 2**63 - 1
"""Largest integer in a header. It bounds times and workspaces (FORMAT.md)."""


def listing_faults(
    listing: Any, provider: str, signature: Signature, target: BuildTarget
) -> Iterator[str]:
    """Yields faults in a result from `Provider.enumerate`, worded to follow its name."""
    if not isinstance(listing, Enumeration):
        yield f"returned {type(listing).__name__}; must be an Enumeration"
        return
    for field in ("candidates", "rejections"):
        if not isinstance(getattr(listing, field), tuple | list):
            yield f"returned {type(getattr(listing, field)).__name__} as {field}; must be a tuple"
            return
    if listing.absence is not None and not isinstance(listing.absence, str):
        yield f"returned {listing.absence!r} as absence; must be text or None"
    for rejection in listing.rejections:
        if not isinstance(rejection, Rejection) or not all(
            isinstance(text, str) for text in (rejection.operator, rejection.reason)
        ):
            yield f"returned {one_line(repr(rejection))} in rejections; must be a Rejection"
    for candidate in listing.candidates:
        if type(candidate) is not Candidate:
            text = one_line(repr(candidate))[:100]
            yield f"returned {text} in candidates; must be a Candidate{EXACTLY}"
            return
        for text in _candidate_faults(candidate, provider, signature, target):
            yield f"listed {one_line(repr(candidate.operator))}, whose {text}"
    counts = Counter(candidate.operator for candidate in listing.candidates)
    for operator, count in counts.items():
        if count > 1:
            yield f"listed {operator!r} {count} times; each operator must have a unique name"


def listing_difference(first: Enumeration, second: Enumeration) -> str | None:
    """Describes how two listings for one signature differ apart from order, worded like a fault."""
    first_candidates, second_candidates = (
        {candidate.operator: candidate for candidate in listing.candidates}
        for listing in (first, second)
    )
    for operator in (*first_candidates, *second_candidates):
        if operator not in first_candidates or operator not in second_candidates:
            return f"listed {operator!r} in only one of two calls; must list the same each time"
        if first_candidates[operator] != second_candidates[operator]:
            return f"listed {operator!r} with different facts in a second call; must list the same"
    return None


def _candidate_faults(
    candidate: Candidate, provider: str, signature: Signature, target: BuildTarget
) -> Iterator[str]:
    """Yields one candidate's faults: the field, its value, the allowed values."""
    operator = candidate.operator
    if (
        not isinstance(operator, str)
        or not _OPERATOR.fullmatch(operator)
        or len(operator) > MAX_OPERATOR_LENGTH
    ):
        yield (
            f"name must be printable ASCII, at most {MAX_OPERATOR_LENGTH} characters, without "
            "outer blanks"
        )
    if candidate.provider != provider:
        yield f"provider is {candidate.provider!r}, must be {provider!r}"
    if candidate.signature != signature:
        key = getattr(candidate.signature, "key", candidate.signature)
        yield f"signature is {key}, must be the requested one"
    yield from _design_faults(candidate.design)
    yield from _shape_faults(candidate.block_shape)
    alignment = candidate.alignment_bytes
    most = MAX_KERNEL_ALIGNMENT_BYTES
    if not is_integer(alignment, 1, most) or alignment & (alignment - 1):
        yield f"alignment_bytes is {alignment!r}, must be a power of two from 1 to {most}"
    yield from _call_faults(candidate, signature)
    sizes = candidate.cluster_sizes
    if not isinstance(sizes, tuple) or not all(
        is_integer(size, 1, MAX_CLUSTER_BLOCKS) for size in sizes
    ):
        yield f"cluster_sizes is {sizes!r}, must be a tuple of 1 to {MAX_CLUSTER_BLOCKS}"
    else:
        known = target.device.max_active_clusters
        strange = [size for size in sizes if size not in known]
        if strange:
            yield (
                f"cluster_sizes has {strange[0]}; the device profile {target.device.name} knows "
                f"{', '.join(map(str, sorted(known)))}"
            )
        yield from _schedule_faults(candidate)
    if not is_integer(candidate.preference, -MAX_EXTENT, MAX_EXTENT):
        yield f"preference is {candidate.preference!r}, must be an integer of 32 bits"
    if not isinstance(candidate.is_deterministic, bool):
        yield f"is_deterministic is {candidate.is_deterministic!r}, must be true or false"
    if not isinstance(candidate.added_code, str):
        yield f"added_code is {candidate.added_code!r}, must be text"
    traits = candidate.traits
    if not isinstance(traits, tuple) or not all(isinstance(word, str) and word for word in traits):
        yield f"traits is {traits!r}, must be a tuple of texts"


def _schedule_faults(candidate: Candidate) -> Iterator[str]:
    """Yields faults in how a kernel learns the number of concurrent clusters."""
    convention = candidate.calling_convention
    known = parse_calling_convention(convention) if isinstance(convention, str) else None
    if known is None or next(_design_faults(candidate.design), None) is not None:
        return  # a fault reported elsewhere
    design = candidate.design
    is_persistent = design.scheduler in (STATIC_PERSISTENT, DYNAMIC_PERSISTENT)
    if known.takes_clusters and not is_persistent:
        yield (
            f"calling_convention is {convention!r}; scheduler {design.scheduler} takes no clusters"
        )
    clusters = filter(None, (design.cluster, design.fallback_cluster))
    expected = sorted({m * n for m, n in clusters}) if is_persistent else []
    sizes = candidate.cluster_sizes
    if known.takes_clusters and sizes:
        yield f"cluster_sizes is {sizes!r}, must be () if launches pass the number of clusters"
    elif not known.takes_clusters and sorted({*sizes}) != expected:
        alternative = ", or clusters in its calling_convention" if is_persistent else ""
        yield (
            f"cluster_sizes is {sizes!r}, must be {tuple(expected)!r} with scheduler "
            f"{design.scheduler}{alternative}"
        )


def _call_faults(candidate: Candidate, signature: Signature) -> Iterator[str]:
    """Yields faults in a candidate's calling convention and workspace."""
    text = candidate.calling_convention
    convention = parse_calling_convention(text) if isinstance(text, str) else None
    if convention is None:
        yield f"calling_convention is {text!r}; FORMAT.md lists the allowed ones"
        return
    workspace = candidate.workspace_bytes
    if not is_integer(workspace, 0, MAX_HEADER_INTEGER):
        yield f"workspace_bytes is {workspace!r}, must be 0 or more, and at most 2**63 - 1"
        return
    formula = candidate.workspace
    if formula is not None:
        fault = _formula_fault(formula) or formula.fault(signature.op)
        if fault is None and workspace:
            fault = f"workspace_bytes is {workspace}, must be 0 with a workspace formula"
        if fault is not None:
            yield f"workspace is {formula!r}: {fault}"
            return
    misfit = convention.misfit(signature, candidate.has_workspace)
    if misfit is not None:
        yield f"calling_convention is {text!r}: {misfit}"


def _formula_fault(formula: Any) -> str | None:
    if type(formula) is not TileWorkspace:
        return "must be a TileWorkspace or None"
    extents = _are_extents(formula.tile, 2) and _are_extents(formula.tiles_multiple, 2)
    sizes = (formula.zeroed_once, formula.zeroed_per_tile, formula.scratch_per_tile)
    if extents and all(is_integer(size, 0, MAX_TILE_BYTES) for size in sizes):
        return None
    return (
        f"its tile and tiles_multiple must be two integers of {_EXTENTS}, its bytes integers "
        f"from 0 to {MAX_TILE_BYTES}"
    )


def _design_faults(design: Any) -> Iterator[str]:
    if type(design) is not KernelDesign:
        yield f"design is {type(design).__name__}, must be a KernelDesign{EXACTLY}"
        return
    if not _are_extents(design.tile, 3):
        yield f"tile is {design.tile!r}, must be three integers (m, n, k) of {_EXTENTS}"
    if design.ctas_per_tile not in (1, 2):
        yield f"ctas_per_tile is {design.ctas_per_tile!r}, must be 1 or 2"
    clusters: list[tuple[str, Any]] = [("cluster", design.cluster)]
    if design.fallback_cluster is not None:
        clusters.append(("fallback_cluster", design.fallback_cluster))
    for name, cluster in clusters:
        if not _are_extents(cluster, 2) or cluster[0] * cluster[1] > MAX_CLUSTER_BLOCKS:
            yield (
                f"{name} is {cluster!r}, must be two integers (m, n) of 1 or more, together at "
                f"most {MAX_CLUSTER_BLOCKS}"
            )
    if design.scheduler not in SCHEDULERS:
        yield f"scheduler is {design.scheduler!r}, must be one of {', '.join(SCHEDULERS)}"
    if design.cluster_limits:
        yield "cluster_limits are set, must be empty: the builder fills them in from cluster_sizes"
    for name in ("swapped", "dependent_launch"):
        if not isinstance(getattr(design, name), bool):
            yield f"{name} is {getattr(design, name)!r}, must be true or false"
    if not is_integer(design.splits, 1, MAX_EXTENT):
        yield f"splits is {design.splits!r}, must be an integer of {_EXTENTS}"


def _shape_faults(shape: Any) -> Iterator[str]:
    if type(shape) is not BlockShape:
        yield f"block_shape is {type(shape).__name__}, must be a BlockShape{EXACTLY}"
        return
    if not _are_extents(shape.tile, 3) or not _are_extents(shape.cluster, 2):
        yield (
            f"block_shape has tile {shape.tile!r} and cluster {shape.cluster!r}, must be three and "
            f"two integers of {_EXTENTS}"
        )
    if not isinstance(shape.swapped, bool):
        yield f"block_shape has swapped {shape.swapped!r}, must be true or false"
    if not is_integer(shape.splits, 1, MAX_EXTENT):
        yield f"block_shape has splits {shape.splits!r}, must be an integer of {_EXTENTS}"


def is_version_text(text: Any) -> bool:
    """Returns True if a bundle may state the text as a version or model name."""
    return isinstance(text, str) and text.isprintable() and 0 < len(text) <= MAX_VERSION_LENGTH


def _are_extents(value: Any, count: int) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == count
        and all(is_integer(extent, 1, MAX_EXTENT) for extent in value)
    )


def is_integer(value: Any, least: int, most: int | None = None) -> bool:
    """Returns True for an integer, not a subclass's instance, within bounds."""
    return type(value) is int and least <= value and (most is None or value <= most)
