"""Facts that must be equal on two machines for one to compile the other's kernels."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from typing import Any

from nvgemm_runtime import __version__
from nvgemm_runtime.gemm.target import Target

from ...providers import load_provider
from ..compiler import Task, code_inputs

Facts = dict[str, Any]
"""Facts by name, as a JSON object."""


def facts_for(kinds: Iterable[tuple[str, Target]]) -> Facts:
    """Returns this machine's facts for compiling kernels of these providers for these targets.

    Raises:
        ToolchainError: If the builder is incomplete.
    """
    return process_facts() | {
        f"provider {name} for {target.key}": _flat(code_inputs(load_provider(name), target))
        for name, target in sorted(kinds)
    }


def process_facts() -> Facts:
    """Returns the facts that need no compiler."""
    return {
        "nvgemm-aot": __version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "processor": platform.machine(),
    }


def kinds_of(tasks: Iterable[Task]) -> set[tuple[str, Target]]:
    """Returns the pairs of provider and target among tasks."""
    return {(task.candidate.provider, task.target.target) for task in tasks}


def differences(here: Facts, there: Facts) -> list[str]:
    """Describes each fact that differs between this build and a worker, in a few words."""
    texts: dict[str, None] = {}
    for name, expected in here.items():
        observed = there.get(name)
        if not isinstance(expected, dict):
            if observed != expected:
                texts[f"{name} {_shown(observed)}, this build has {_shown(expected)}"] = None
            continue
        other = observed if isinstance(observed, dict) else {}
        for part in {**expected, **other}:
            if expected.get(part) != other.get(part):
                texts[
                    f"{part} {_shown(other.get(part))}, this build has {_shown(expected.get(part))}"
                ] = None
    return list(texts)


def _flat(inputs: Facts) -> Facts:
    """Returns the inputs with each package's version as a fact of its own."""
    return {**inputs, **inputs["toolchain"], "toolchain": None}


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
