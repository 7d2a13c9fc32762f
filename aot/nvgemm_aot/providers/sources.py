"""Source digests for providers and models, used in cache keys."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
from pathlib import Path

from nvgemm_runtime.bundle.format import canonical_json


def source_modules(source: object) -> tuple[str, ...]:
    """Returns the modules and packages whose source shapes a provider's or model's answers."""
    module = type(source).__module__
    external = getattr(source, "source_module", None)
    return (module, external) if isinstance(external, str) else (module,)


@functools.cache
def source_digest(name: str) -> str:
    """Returns the digest of a module's source; a package's covers all its modules.

    A module without source, such as a compiled extension, counts by name alone. Its distribution's
    version must distinguish releases.
    """
    module = importlib.import_module(name)
    sources = {}
    with contextlib.suppress(OSError, TypeError):
        sources[""] = inspect.getsource(module)
    for path in getattr(module, "__path__", ()):
        for file in sorted(Path(path).rglob("*.py")):
            sources[str(file.relative_to(path))] = file.read_text("utf-8", errors="replace")
    return hashlib.sha256(canonical_json(sources)).hexdigest()
