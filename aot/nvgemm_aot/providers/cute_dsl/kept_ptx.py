"""Hands the PTX that kernels are assembled from to a build that keeps it.

Builds keep no PTX by default: then nothing here has an effect.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_DSL_MODULE = "cutlass.cutlass_dsl"

_collected: list[str] | None = None
"""PTX that the current compilation has handed over; None if nobody keeps it."""


def keep_ptx(text: str) -> None:
    """Hands over the PTX of a kernel's device code, as assembled.

    For providers that compile without the CuTe DSL, within `Provider.compile`. The DSL's PTX is
    found without a call.
    """
    if _collected is not None:
        _collected.append(text)


@contextlib.contextmanager
def collected_ptx() -> Iterator[list[str]]:
    """Collects the PTX of everything that is compiled within the block; the list fills at its end.

    The DSL reads these settings from an object of its own: `cute_setup.set_environment` removes its
    environment variables. Objects stay the same to the byte.
    """
    global _collected
    collected: list[str] = []
    _collected = collected
    try:
        with tempfile.TemporaryDirectory() as directory, _dumping(Path(directory)):
            yield collected
            collected += (path.read_text() for path in sorted(Path(directory).glob("*.ptx")))
    finally:
        _collected = None


@contextlib.contextmanager
def _dumping(directory: Path) -> Iterator[None]:
    """Lets the DSL write PTX to a directory, if this process has imported it."""
    module = sys.modules.get(_DSL_MODULE)
    if module is None:
        yield
        return
    settings = module.CuTeDSL._get_dsl().envar
    before = settings.keep_ptx, settings.dump_dir
    settings.keep_ptx, settings.dump_dir = True, str(directory)
    try:
        yield
    finally:
        settings.keep_ptx, settings.dump_dir = before
