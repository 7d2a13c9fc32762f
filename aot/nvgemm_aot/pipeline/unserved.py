"""Declared problems without a kernel, over all targets of a build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.bundle.ranking_entries import Scope, UnservedReason
from nvgemm_runtime.errors import CompileError, NoCandidateError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A declared problem that no kernel of a target serves. The other problems are built.

    ``reason`` is one line. ``failed`` is True if there are operators but none compiles. ``device``
    names a profile if only that product lacks a kernel, and is None if every product does.
    """

    target: Target
    problem: Problem
    reason: str
    failed: bool = False
    device: str | None = None

    @property
    def where(self) -> str:
        """The target, followed by the product if only that one lacks a kernel."""
        name = self.target.short_name
        return name if self.device is None else f"{name} on {self.device}"

    @property
    def stored_reason(self) -> UnservedReason:
        """The reason in the form that a bundle stores."""
        return UnservedReason(text=self.reason, scope=Scope.PROBLEM)


def unserved_everywhere(
    products: Sequence[Mapping[Problem, UnservedReason]],
) -> dict[Problem, UnservedReason]:
    """Returns problems without a kernel on any product, with the first product's reason."""
    first, *others = products
    return {
        problem: reason
        for problem, reason in first.items()
        if all(problem in other for other in others)
    }


def join_products(
    unserved: Iterable[Unserved], unserved_problems: Collection[Problem]
) -> list[Unserved]:
    """Joins entries that hold for all products: ``unserved_problems`` appear once."""
    entries: dict[tuple[Problem, str | None], Unserved] = {}
    for entry in unserved:
        if entry.problem in unserved_problems:
            entry = replace(entry, device=None)
        entries.setdefault((entry.problem, entry.device), entry)
    return list(entries.values())


def require_served(unserved: Sequence[Unserved], targets: int, *, strict: bool = False) -> None:
    """Requires that some target serves each problem; if ``strict``, every target and product.

    Raises:
        CompileError: If an operator does not compile. Names every problem that no target serves,
            with the reason.
        NoCandidateError: If a problem has no operator at all. Same message.
    """
    if strict:
        targets = 1
    else:
        unserved = [entry for entry in unserved if entry.device is None]
    counts = Counter(entry.problem for entry in unserved)
    missing = [entry for entry in unserved if counts[entry.problem] >= targets]
    if not missing:
        return
    count = len({entry.problem for entry in missing})
    pronoun = "it" if count == 1 else "them"
    failed = any(entry.failed for entry in missing)
    next_step = (
        f"list other providers for {pronoun} under `providers` in the manifest (default: all that "
        f"come with nvgemm-aot), or change or remove {pronoun}"
        if failed
        else f"change or remove {pronoun}"
    )
    head = f"no kernel for {count} problem{'s' * (count > 1)}; {next_step}:"
    lines = [f"  {entry.where}: {entry.problem.key}: {entry.reason}" for entry in missing]
    error = CompileError if failed else NoCandidateError
    raise error("\n".join([head, *lines]))
