"""What the choices of this process depend on besides the mode, as one text for keys of caches.

It is among Inductor's options (`options`), where torch and programs like vLLM read it, in every
process that compiles. So without bundles it imports next to nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets

from ..settings import RECORD_VARIABLE, choosing_key, jit_candidates

_PROCESS = secrets.token_hex()
"""Tells this process from others."""

_log = logging.getLogger(__name__)


def choices_key() -> str:
    """A digest of bundles and settings; it has no paths in it. Never raises."""
    try:
        return hashlib.sha256(_text().encode()).hexdigest()
    except Exception as error:
        # Raising would fail the compilation. Whatever broke the digest breaks choices too.
        log_failure(error)
        return "unknown"


def _text() -> str:
    from .. import __version__
    from ..installed.digest import has_bundles, installed_digest
    from ..installed.jit_cache import generation
    from ..jit.builder import missing_module

    # Without the JIT cache's content: it grows with compilation, and graphs stay right until a
    # kernel is removed, which changes the generation.
    compiles = jit_candidates() if missing_module() is None else 0
    text = f"{__version__} {choosing_key()} {compiles} {generation()}"
    if os.environ.get(RECORD_VARIABLE):
        text = f"{text} {_PROCESS}"  # a graph from a cache would not be recorded
    if not has_bundles():
        return text
    from ..gemm.aten import settings_key

    # ATen's measured times count under some of these settings only.
    return f"{text} {settings_key()} {installed_digest()}"


def log_failure(error: Exception) -> None:
    """Log why there is no key, once: torch asks for it at every graph."""
    _log_once(f"{type(error).__name__}: {error}")


@functools.cache
def _log_once(failure: str) -> None:
    _log.warning("torch's compile caches do not know the installed bundles: %s", failure)
