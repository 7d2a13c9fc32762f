"""Digests of the source of providers and models, for keys of what they made."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
from pathlib import Path

from nvgemm_runtime.bundle.format import canonical_json


def source_modules(source: object) -> tuple[str, ...]:
    """Modules and packages whose source shapes what a provider or a model answers."""
    own = type(source).__module__
    external = getattr(source, "source_module", None)
    return (own, external) if isinstance(external, str) else (own,)


@functools.cache
def source_digest(name: str) -> str:
    """Digest of a module's source; for a package, of all its modules.

    A module without source, such as a compiled one of another package, counts by its name alone:
    its distribution's version has to tell it from others.
    """
    module = importlib.import_module(name)
    sources = {}
    with contextlib.suppress(OSError, TypeError):
        sources[""] = inspect.getsource(module)
    for path in getattr(module, "__path__", ()):
        for file in sorted(Path(path).rglob("*.py")):
            sources[str(file.relative_to(path))] = file.read_text("utf-8", errors="replace")
    return hashlib.sha256(canonical_json(sources)).hexdigest()
