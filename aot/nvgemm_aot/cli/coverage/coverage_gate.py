"""``coverage --fail-under``: gate for CI that lists missing GEMMs and the lines to declare them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from nvgemm_runtime.errors import CoverageError
from nvgemm_runtime.gemm.aten import product_of_sum
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.support import unavailable
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES
from nvgemm_runtime.recording.text import gemm_line, target_entry

from ...targets import BuildTarget, default_devices
from ...workload.coverage import (
    SERVED,
    GemmCoverage,
    Status,
    TargetCoverage,
    Weight,
    call_of,
    readings,
)
from ..terminal.printing import percent_text

_MOST_SHOWN = 5
"""Most missed GEMMs that a message names per target."""


def require_coverage(
    targets: Sequence[TargetCoverage],
    least_percent: Decimal,
    *,
    by: Weight,
    declared_only: bool = False,
) -> None:
    """Checks that every target reaches the required coverage.

    With ``declared_only``, problems that are only served by signature count as missing.

    Raises:
        CoverageError: If a target falls short; names its percentage, the heaviest missing GEMMs and
            the manifest lines that would cover them.
    """
    enough = frozenset({Status.DECLARED}) if declared_only else SERVED
    short = []
    for coverage in targets:
        if coverage.percent(by, enough) < Fraction(least_percent):
            same = [
                other.target for other in targets if other.target.target == coverage.target.target
            ]
            short.append(
                _explain_shortfall(coverage, least_percent, by, enough, _target_entry(same))
            )
    if short:
        raise CoverageError("\n".join(short))


def _explain_shortfall(
    target: TargetCoverage,
    least_percent: Decimal,
    by: Weight,
    enough: frozenset[Status],
    entry: str,
) -> str:
    arch, device = target.target.target.arch, target.target.device.name
    percent = percent_text(target.percent(by, enough))
    kind = "covered" if enough == SERVED else "declared"
    missing = target.heaviest(by, frozenset(Status) - enough)
    shown = missing[:_MOST_SHOWN]
    lines = [
        f"{target.target.target.key} on {device}: {percent} {kind} by "
        f"{by.value}, must be at least {least_percent} %; the heaviest of {len(missing)} missing:",
        *(f"  {_explain_miss(gemm)}" for gemm in shown),
    ]
    declarable = (_problem_to_declare(gemm, arch) for gemm in shown)
    problems = list(dict.fromkeys(problem for problem in declarable if problem is not None))
    if problems:
        lines += [
            "a bundle built from these lines covers those that a manifest can declare:",
            f"  targets: [{entry}]",
            "  gemms:",
            *(f"    {gemm_line(problem)}" for problem in problems),
        ]
    return "\n".join(lines)


def _target_entry(products: Sequence[BuildTarget]) -> str:
    """Returns the entry under ``targets`` that declares a target for GPU products, on one line."""
    built, devices = products[0].target, [product.device.name for product in products]
    if devices == [*default_devices(built.arch, built.platform)]:
        return target_entry(built)
    entry = {"arch": built.arch, "device": devices[0]}
    if len(devices) > 1:
        entry = {"arch": built.arch, "devices": f"[{', '.join(devices)}]"}
    if products[0].device.platform != built.platform:
        entry["platform"] = built.platform
    if built.cuda != Target.cuda:
        entry["cuda"] = built.cuda
    return f"{{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}"


def _problem_to_declare(gemm: GemmCoverage, arch: str) -> Problem | None:
    """Returns the problem to declare for a GEMM, or None if the target has no kernel for it."""
    if gemm.problem is None:
        return None
    call = call_of(gemm.problem)
    if readings(call)[0].alignment_bytes < ALIGNMENT_BYTES:
        return None
    if unavailable(gemm.problem.signature, arch) is None:
        return gemm.problem
    product = product_of_sum(call)
    if product is None:
        return None
    problem = readings(product)[0].problem
    return None if problem == gemm.ranked_as else problem


def _explain_miss(gemm: GemmCoverage) -> str:
    if gemm.status is Status.SIGNATURE:
        addition = (
            "; a bundled kernel computes its product, and torch adds" if gemm.is_split else ""
        )
        return f"{gemm.gemm}: served by signature only{addition}"
    return f"{gemm.gemm}: {gemm.reasons[0]}"
