"""Refuses bundles that cannot be opened, in mode ``required``."""

from __future__ import annotations

from ..errors import RequiredError
from ..settings import BUNDLES_VARIABLE, COMPILE_OPTION, MODE_VARIABLE, POLICY_VARIABLE
from .registry import INSTALLATION, FoundBundle


def require_opened() -> None:
    """Raises an error if a bundle cannot be opened, for mode ``required``.

    Such a bundle may declare any GEMM, so no GEMM can be computed without it. Bundles for another
    device can be opened.

    Raises:
        RequiredError: If a bundle cannot be opened.
    """
    unopened = [entry for entry in INSTALLATION.shipped_bundles() if entry.bundle is None]
    if not unopened:
        return
    reasons = tuple(f"{entry.origin}: {entry.problem}" for entry in unopened)
    lines = [
        f"bundles cannot be opened, so it is unknown what they declare, but {MODE_VARIABLE}="
        f"required (or {COMPILE_OPTION}) needs all declarations:",
        *(f"  {reason}" for reason in reasons),
        *dict.fromkeys(map(_next_step, unopened)),
    ]
    raise RequiredError("\n".join(lines), reasons)


def _next_step(entry: FoundBundle) -> str:
    """Returns the step that repairs a bundle that cannot be opened."""
    if entry.is_refused:
        return f"sign it with a key of the policy, or correct the policy in {POLICY_VARIABLE}"
    if entry.origin == BUNDLES_VARIABLE:
        return (
            f"correct or remove the path in {BUNDLES_VARIABLE}; rebuild a damaged bundle with "
            "nvgemm-aot build"
        )
    if entry.requirement is None:
        return f"reinstall the kernel wheel whose metadata is in {entry.path}, or delete that path"
    return (
        f"reinstall the wheel of {entry.requirement}: pip install --force-reinstall --no-deps FILE"
    )
