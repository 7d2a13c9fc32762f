"""A plugin of pytest that notes each test in a file as it begins and ends.

``tests/gpu/run`` reads the file: if a kernel hangs, it can end the process, name the kernel, and go
on in another process with what is left. Of a test that did not end, all tests of its kernel are
left out from then on. After an error that a CUDA context does not survive, the session ends, and
the rest is run in another one, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "NVGEMM_GPU_TESTS_PROGRESS"
"""Names the file: one JSON document a line."""

CONTEXT_LOST = 77
"""Exit status of a session that ended because its CUDA context cannot be used any more."""


def read_progress(path: Path) -> list[dict[str, Any]]:
    """What is noted in a file, oldest first; nothing if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def unfinished(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The beginnings of tests that did not end."""
    begun: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "begin":
            begun[event["test"]] = event
        elif event["event"] == "end":
            begun.pop(event["test"], None)
    return list(begun.values())


def _file() -> Path | None:
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


def _note(event: str, test: str, **more: Any) -> None:
    path = _file()
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"event": event, "test": test, **more}) + "\n")


def _kernel(item: pytest.Item) -> tuple[str, str]:
    """Id and operator of the kernel that a test runs; empty where it is not of one kernel."""
    call = getattr(item, "callspec", None)
    given = call.params if call is not None else {}
    _, kernel = given.get("installed") or (None, given.get("kernel"))
    id_, operator = getattr(kernel, "id", ""), getattr(kernel, "operator", "")
    return (id_, operator) if id_ else ("", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = _file()
    if path is None:
        return
    events = read_progress(path)
    done = {event["test"] for event in events}
    hung = {event["kernel"] for event in unfinished(events)} - {""}
    left = [item for item in items if item.nodeid not in done and _kernel(item)[0] not in hung]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    kernel, operator = _kernel(item)
    _note("begin", item.nodeid, kernel=kernel, operator=operator)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _note("outcome", report.nodeid, outcome=report.outcome)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    _note("end", nodeid)
    if _file() is not None and _is_context_lost():
        pytest.exit(f"the CUDA context is lost after {nodeid}", returncode=CONTEXT_LOST)


def _is_context_lost() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
