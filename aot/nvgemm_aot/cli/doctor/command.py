"""``nvgemm-aot doctor``: shows what this machine lacks to run kernels or to build them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click

from nvgemm_runtime.errors import UnhealthyError
from nvgemm_runtime.matching.thresholds import MIN_GAIN
from nvgemm_runtime.settings import printable_path

from ..build.measured_rankings import NONE, rankings_text
from ..terminal.printing import count_text, keep_stdout, print_result, size_text, table
from ..terminal.shared_options import json_option
from .policy_here import policy_rows

MISSING = "missing"


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show whether this machine can run prebuilt kernels, and if not, what is missing.

    If the builder is installed, also whether it can build kernels. The exit status is 0 if
    kernels can be run, and 32 if they cannot, as on a build machine without a GPU.
    """
    from .diagnosis import diagnose

    with _without_warnings("nvgemm_runtime.installed.registry"), keep_stdout():
        diagnosis = diagnose()
    print_result(diagnosis, diagnosis_text, as_json=as_json)
    if not diagnosis["healthy"]:
        count = count_text(len(diagnosis["problems"]), "problem")
        raise UnhealthyError(f"kernels cannot be run here: {count}; see above")


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Silences a logger's warnings, which the command prints itself."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def diagnosis_text(document: dict[str, Any]) -> str:
    """Renders a diagnosis: versions, each bundle for each GPU, every problem, the verdicts."""
    cache = document["cache"]
    facts = [
        *([name, version or MISSING] for name, version in document["versions"].items()),
        *_build_facts(document),
        ["native launcher", "loads" if document["launcher"] else "does not load"],
        ["CUDA driver", document["driver"] or MISSING],
        ["torch built for", document["torch_cuda"] or "no CUDA"],
        ["runtime library", document["runtime_library"] or MISSING],
        *([f"GPU {index}", gpu] for index, gpu in enumerate(document["gpus"])),
        *policy_rows(document["policy"]),
        *_rankings_row(document),
        *(["confirmed rankings", _confirmed_text(file)] for file in document["confirmed"]),
        ["build cache", _cache_text(cache)],
    ]
    parts = [table(facts, ["part", "found"])]
    if document["bundles"]:
        parts.append("\n".join(_bundle_lines(document)))
    verdicts = []
    if document["build_problems"] is not None:
        verdicts.append(_verdict("build", document["build_problems"]))
    verdicts.append(_verdict("run", document["problems"]))
    return "\n\n".join([*parts, *verdicts])


def _build_facts(document: dict[str, Any]) -> list[list[str]]:
    """Returns rows for the builder, which a machine that only runs kernels does not need."""
    from .diagnosis import OWN

    providers = document["providers"]
    rows: list[list[str]] = []
    if document["build_problems"] is None:
        rows.append(["builder", "not installed; running kernels does not need it"])
        providers = [provider for provider in providers if provider["origin"] != OWN]
    else:
        rows += ([name, version or MISSING] for name, version in document["build_versions"].items())
    return [
        *rows,
        *([f"provider {provider['name']}", _provider_text(provider)] for provider in providers),
    ]


def _verdict(action: str, problems: list[str]) -> str:
    """Returns the verdict on building or running kernels here, after the missing parts."""
    lines = [f"to {action} kernels: {problem}" for problem in problems]
    return "\n".join([*lines, f"kernels {'cannot' if problems else 'can'} be {_DONE[action]} here"])


_DONE = {"build": "built", "run": "run"}


def _rankings_row(document: dict[str, Any]) -> list[list[str]]:
    """Returns rows about measured rankings here; none without a bundle."""
    if not document["bundles"]:
        return []
    torch = document["versions"]["torch"]
    confirmed = {
        file["gpu"]
        for file in document["confirmed"]
        if file["problem"] is None and file["elsewhere"] is None
    }
    rows = []
    for product in document["measured_rankings"]:
        text = rankings_text(product, torch, is_confirmed=product["gpu"] in confirmed)
        rows.append([f"measured on {product['gpu']}", text])
    return rows or ([] if confirmed else [["measured rankings", NONE]])


def _confirmed_text(file: dict[str, Any]) -> str:
    """Describes a file that ``nvgemm-aot confirm`` wrote, and whether it counts here."""
    path = printable_path(file["path"])
    if file["problem"] is not None:
        return f"left out: {file['problem']}"
    counts = f"kernels gain {MIN_GAIN:.0%} or more in {file['gaining']} of {file['problems']} GEMMs"
    if file["elsewhere"] is not None:
        counts = f"does not count here: {file['elsewhere']}"
    measured_on = f"{file['gpu']} with torch {file['torch']}, CUDA {file['cuda']}"
    return f"{path}: {measured_on}, {file['date']}: {counts}"


def _provider_text(provider: dict[str, Any]) -> str:
    problem = provider["problem"]
    return f"from {provider['origin']}" + (f": cannot be used: {problem}" if problem else "")


def _cache_text(cache: dict[str, Any]) -> str:
    if cache["directory"] is None:
        return "no directory; set NVGEMM_AOT_CACHE"
    state = "" if cache["writable"] else ", not writable"
    entries = count_text(cache["entries"], "entry")
    return f"{cache['directory']}: {entries}, {size_text(cache['size_bytes'])}{state}"


def _bundle_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    for bundle in document["bundles"]:
        content = (
            f"{bundle['target']}, {count_text(bundle['kernels'], 'kernel')}"
            if bundle["target"]
            else "unusable"
        )
        lines.append(f"{printable_path(bundle['path'])} ({bundle['origin']}): {content}")
        if bundle["problem"]:
            lines.append(f"  {bundle['problem']}")
            continue
        if bundle["signed_by"]:
            lines.append(f"  {bundle['signed_by']}")
        if bundle["process_refusal"] and not bundle["refusals"]:
            lines.append(f"  {bundle['process_refusal']}")
        lines += [
            f"  GPU {index}: {refusal or _served_text(ranked_for, gpu)}"
            for index, (refusal, ranked_for, gpu) in enumerate(
                zip(bundle["refusals"], bundle["ranked_for"], document["gpu_names"])
            )
        ]
    return lines


def _served_text(ranked_for: str | None, gpu: str) -> str:
    """Describes how a bundle serves a GPU: with rankings for its product, or for another one."""
    if ranked_for in (None, gpu):
        return "served"
    return (
        f"served with the rankings for {ranked_for}: the bundle has none for {gpu}; to measure, "
        "run there: nvgemm-aot confirm"
    )
