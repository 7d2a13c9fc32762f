"""Loads the operators before a torch.export archive loads a compiled model.

Inductor imports torch's archive module in every process that compiles. So the operators are loaded
with the first model, not with that module.

The torch name used here is private and was run on torch 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

from ..report import log_failure
from . import operator_loading


def install() -> None:
    """Makes torch's archive module load the operators before a compiled model."""
    from torch.export.pt2_archive import _package

    load = getattr(_package, "_load_aoti", None)
    if load is None:
        operator_loading.install()  # this torch has no such function: loading early is safe
        return

    @functools.wraps(load)
    def load_with_operators(*arguments: Any, **options: Any) -> Any:
        try:
            operator_loading.install()
        except Exception as error:
            log_failure(error)
        return load(*arguments, **options)

    _package._load_aoti = load_with_operators
