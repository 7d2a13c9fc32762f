"""Gives torch the operators before an archive of torch.export loads a compiled model.

Inductor imports torch's module of archives in every process that compiles. So the operators are not
loaded with that module, but when it loads a model.

The name of torch that is used here is private, and was run on torch 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

from . import operators
from .report import log_failure


def install() -> None:
    """Have torch's module of archives load the operators before a compiled model."""
    from torch.export.pt2_archive import _package

    load = getattr(_package, "_load_aoti", None)
    if load is None:
        operators.install()  # this torch has no such function: load now, which is early but safe
        return

    @functools.wraps(load)
    def load_with_operators(*arguments: Any, **options: Any) -> Any:
        try:
            operators.install()
        except Exception as error:
            log_failure(error)
        return load(*arguments, **options)

    _package._load_aoti = load_with_operators
