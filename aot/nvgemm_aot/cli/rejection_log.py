"""Writing down why operators were not chosen, while a plan is made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.gemm.problem import Problem

if TYPE_CHECKING:
    from ..build.plan import RejectionSink
    from ..providers import Rejection


@contextlib.contextmanager
def open_rejection_log(path: Path | None) -> Iterator[RejectionSink | None]:
    """Write rejections as JSON lines to ``path``; None where there is none.

    Raises:
        StorageError: If the file cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error

    def write(problem: Problem, rejection: Rejection) -> None:
        line = {
            "problem": problem.key,
            "operator": rejection.operator,
            "reason": rejection.reason,
        }
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StorageError(f"{path}: cannot write: {error.strerror}") from error

    with file:
        yield write
