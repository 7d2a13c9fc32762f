"""``nvgemm-aot doctor``: whether this machine can run prebuilt kernels, and what is missing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click

from nvgemm_runtime.errors import UnhealthyError

from .measured_rankings import rankings_text
from .options import json_option
from .printing import count_text, keep_stdout, print_result, size_text, table

MISSING = "missing"


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say whether this machine can run prebuilt kernels, and if not, what is missing.

    The exit status is 0 where it can, and 32 where it cannot.
    """
    from .diagnosis import diagnose

    with _without_warnings("nvgemm_runtime.installed.registry"), keep_stdout():
        diagnosis = diagnose()
    print_result(diagnosis, diagnosis_text, as_json=as_json)
    if not diagnosis["healthy"]:
        raise UnhealthyError(f"{count_text(len(diagnosis['problems']), 'problem')}; see above")


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Silence a logger's warnings, which the command prints itself."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def diagnosis_text(document: dict[str, Any]) -> str:
    """Print a diagnosis: what was found, each bundle for each GPU, then every problem."""
    cache = document["cache"]
    facts = [
        *([name, found or MISSING] for name, found in document["versions"].items()),
        *(
            [name, found or f"{MISSING} (needed for building alone)"]
            for name, found in document["build_versions"].items()
        ),
        *([f"provider {one['name']}", _provider_text(one)] for one in document["providers"]),
        ["native launcher", "loads" if document["launcher"] else "does not load"],
        ["CUDA driver", document["driver"] or MISSING],
        ["torch built for", document["torch_cuda"] or "no CUDA"],
        ["runtime library", document["runtime_library"] or MISSING],
        *([f"GPU {place}", gpu] for place, gpu in enumerate(document["gpus"])),
        *_rankings_row(document),
        ["build cache", _cache_text(cache)],
    ]
    parts = [table(facts, ["part", "found"])]
    if document["bundles"]:
        parts.append("\n".join(_bundle_lines(document)))
    if document["problems"]:
        parts.append("\n".join(f"problem: {problem}" for problem in document["problems"]))
    parts.append("healthy" if document["healthy"] else "not healthy")
    return "\n\n".join(parts)


def _rankings_row(document: dict[str, Any]) -> list[list[str]]:
    """What measured rankings are worth here; nothing where no bundle is."""
    if not document["bundles"]:
        return []
    found = rankings_text(document["measured_rankings"], document["versions"]["torch"])
    return [["measured rankings", found]]


def _provider_text(provider: dict[str, Any]) -> str:
    problem = provider["problem"]
    return f"of {provider['origin']}" + (f": cannot be used: {problem}" if problem else "")


def _cache_text(cache: dict[str, Any]) -> str:
    if cache["directory"] is None:
        return "no place for one; set NVGEMM_AOT_CACHE"
    state = "" if cache["writable"] else ", not writable"
    return (
        f"{cache['directory']}: {cache['entries']} entries, {size_text(cache['size_bytes'])}{state}"
    )


def _bundle_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    for bundle in document["bundles"]:
        what = (
            f"{bundle['target']}, {bundle['kernels']} kernels" if bundle["target"] else "unusable"
        )
        lines.append(f"{bundle['path']} ({bundle['origin']}): {what}")
        if bundle["problem"]:
            lines.append(f"  {bundle['problem']}")
            continue
        if bundle["process_refusal"] and not bundle["refusals"]:
            lines.append(f"  {bundle['process_refusal']}")
        lines += [
            f"  GPU {place}: {refusal or 'served'}"
            for place, refusal in enumerate(bundle["refusals"])
        ]
    return lines
