"""Gives torch the operators before an archive of torch.export loads a compiled model.

Inductor imports torch's module of archives in every process that compiles. So the operators are not
loaded with that module, but when it loads a model.

The name of torch that is used here is private, and was run on torch 2.13.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from . import operators
from .report import log_failure


def install() -> None:
    """Have torch's module of archives load the operators before a compiled model."""
    from torch.export.pt2_archive import _package

    if not load_operators_first(_package):
        operators.install()  # this torch has no such function: load now, which is early but safe


def load_operators_first(archives: ModuleType) -> bool:
    """Put the operators before the function that loads a model; False where there is none."""
    load = getattr(archives, "_load_aoti", None)
    if load is None:
        return False

    @functools.wraps(load)
    def load_with_operators(*arguments: Any, **options: Any) -> Any:
        try:
            operators.install()
        except Exception as error:
            log_failure(error)
        return load(*arguments, **options)

    vars(archives)["_load_aoti"] = load_with_operators
    return True
