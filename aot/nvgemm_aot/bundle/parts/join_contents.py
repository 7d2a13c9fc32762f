"""Joins bundle contents for one target; the caller decides what becomes of a problem's rankings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvgemm_runtime.bundle.ranking_entries import UnservedReason
from nvgemm_runtime.gemm.problem import Problem

from ..content import BuiltKernel, BundleContent, ProblemRanking

JoinRankings = Callable[[Sequence[ProblemRanking], Mapping[str, BuiltKernel]], ProblemRanking]
"""Joins the rankings that several contents have for one problem and GPU product.

Takes them in the order of the contents, and all kernels by id.
"""

_BASES = ("estimated", "reported", "measured")


def difference(
    contents: Sequence[tuple[Path, BundleContent]], properties: Mapping[str, str]
) -> str | None:
    """Describes the first difference between contents that cannot be joined, or returns None.

    Args:
        contents: Contents with their bundles' paths.
        properties: Names of the properties that must be equal, by their name in the message.
    """
    first_path, first = contents[0]
    for path, content in contents[1:]:
        for label, name in properties.items():
            expected, actual = getattr(first, name), getattr(content, name)
            if expected != actual:
                return (
                    f"{path}: {label} is {_format_value(actual)}, that of {first_path} is "
                    f"{_format_value(expected)}"
                )
    return None


def _format_value(value: Any) -> Any:
    """Formats a target, device profiles or a toolchain for a message."""
    return ", ".join(value) if isinstance(value, tuple) else getattr(value, "key", value)


def join_contents(contents: Sequence[BundleContent], join: JoinRankings) -> BundleContent:
    """Joins contents with the same target and toolchain.

    The order of contents matters only to ``join``, and for the generator and the build key, which
    are the first content's. A kernel that a content ranks, and the result does not, is left out. A
    problem that one content ranks is served, and one that any content declares is declared.
    """
    first = contents[0]
    kernels = _join_kernels(kernel for content in contents for kernel in content.kernels)
    groups: dict[tuple[Problem, str], list[ProblemRanking]] = {}
    for content in contents:
        for ranking in content.rankings:
            groups.setdefault((ranking.problem, ranking.gpu), []).append(ranking)
    unserved: dict[Problem, UnservedReason] = {}
    for content in contents:
        for problem, reason in content.unserved.items():
            unserved[problem] = min(reason, unserved.get(problem, reason), key=_reason_order)
    joined = [
        replace(
            rankings[0] if len(rankings) == 1 else join(rankings, kernels),
            is_declared=any(ranking.is_declared for ranking in rankings) or problem in unserved,
            is_further=all(ranking.is_further for ranking in rankings),
        )
        for (problem, _), rankings in groups.items()
    ]
    ranked_before = {id_ for content in contents for r in content.rankings for id_, _ in r.kernels}
    ranked = {id_ for ranking in joined for id_, _ in ranking.kernels}
    ranked_problems = {problem for problem, _ in groups}
    devices = _join_devices(contents)
    return replace(
        first,
        device=devices[0],
        further_devices=devices[1:],
        kernels=tuple(
            kernel
            for kernel in kernels.values()
            if kernel.id in ranked or kernel.id not in ranked_before
        ),
        rankings=_mark_further_rankings(joined, _first_products(contents, devices[0])),
        unserved={
            problem: reason
            for problem, reason in unserved.items()
            if problem not in ranked_problems
        },
    )


def _join_kernels(kernels: Iterable[BuiltKernel]) -> dict[str, BuiltKernel]:
    """Maps ids to kernels; for one with several entries, takes the least certain one."""
    by_id: dict[str, BuiltKernel] = {}
    for kernel in kernels:
        known = by_id.setdefault(kernel.id, kernel)
        if known is not kernel:
            by_id[kernel.id] = min(known, kernel, key=_kernel_order)
    return by_id


def _kernel_order(kernel: BuiltKernel) -> tuple[str, str, list[int], str]:
    bases = [limit.basis for limit in kernel.design.cluster_limits]
    certainty = [_BASES.index(basis) if basis in _BASES else -1 for basis in bases]
    return kernel.signature.key, kernel.operator, certainty, repr(kernel.facts())


def _reason_order(reason: UnservedReason) -> tuple[str, str]:
    """Puts the widest reason first, so that the result does not depend on the order."""
    return "" if reason.scope is None else reason.scope.value, reason.text


def _join_devices(contents: Sequence[BundleContent]) -> tuple[str, ...]:
    """Returns all device profiles, the first one in front."""
    lists = {content.devices for content in contents}
    if len(lists) == 1:
        return contents[0].devices
    first = min(content.device for content in contents)
    return (first, *sorted({name for names in lists for name in names} - {first}))


def _first_products(
    contents: Iterable[BundleContent], device: str
) -> dict[Problem, tuple[bool, str]]:
    """Returns the product of each problem's first ranking: the device's before others."""
    products: dict[Problem, tuple[bool, str]] = {}
    for content in contents:
        for ranking in content.rankings:
            if not ranking.is_further:
                product = content.device != device, ranking.gpu
                known = products.setdefault(ranking.problem, product)
                products[ranking.problem] = min(known, product)
    return products


def _mark_further_rankings(
    rankings: Iterable[ProblemRanking], firsts: Mapping[Problem, tuple[bool, str]]
) -> tuple[ProblemRanking, ...]:
    """Marks all but a problem's first ranking as further."""
    return tuple(
        replace(
            ranking,
            is_further=ranking.is_further or firsts[ranking.problem][1] != ranking.gpu,
        )
        for ranking in rankings
    )
