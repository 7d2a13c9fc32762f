"""Reports declared problems that no kernel serves; the others are built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nvgemm_runtime.errors import CompileError, NoCandidateError
from nvgemm_runtime.gemm.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A declared problem for which a target has no kernel.

    Attributes:
        arch: The target's architecture.
        problem: The problem.
        reason: Why, on one line.
        failed: Whether there are operators, none of which compiles.
    """

    arch: str
    problem: Problem
    reason: str
    failed: bool = False


def require_served(unserved: Sequence[Unserved], targets: int) -> None:
    """Demand that some target serves each problem.

    Args:
        unserved: What targets do not serve.
        targets: How many targets there are.

    Raises:
        CompileError: Naming every problem that none of them serves, and why, if an operator of one
            does not compile.
        NoCandidateError: Likewise, if there are no operators.
    """
    counts = Counter(one.problem for one in unserved)
    nowhere = [one for one in unserved if counts[one.problem] >= targets]
    if not nowhere:
        return
    count = len({one.problem for one in nowhere})
    head = (
        f"no kernel for {count} problem{'s' * (count > 1)}; change or remove "
        f"{'it' if count == 1 else 'them'}:"
    )
    lines = [f"  {one.arch}: {one.problem.key}: {one.reason}" for one in nowhere]
    error = CompileError if any(one.failed for one in nowhere) else NoCandidateError
    raise error("\n".join([head, *lines]))
