"""Digest of everything but the mode that this process's choices depend on, for cache keys.

It is an Inductor option (`options`). Torch and programs such as vLLM read it in every process that
compiles, so without bundles it imports next to nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets

from ...settings import RECORD_VARIABLE, choosing_key, jit_candidates

_PROCESS = secrets.token_hex()
"""Identifies this process."""

_log = logging.getLogger(__name__)


def choices_key() -> str:
    """Returns a digest of bundles and settings, without paths. Never raises."""
    try:
        return hashlib.sha256(_text().encode()).hexdigest()
    except Exception as error:
        # Raising would fail the compilation. The same error keeps kernels out of the choices.
        log_failure(error)
        return "unknown"


def _text() -> str:
    from ... import __version__
    from ...installed.digest import has_bundles, installed_digest
    from ...installed.jit_cache import generation
    from ...jit.builder import missing_module

    # Without the JIT cache's content, which grows as graphs compile. Graphs stay valid until a
    # kernel is removed, which changes the generation.
    compiles = jit_candidates() if missing_module() is None else 0
    text = f"{__version__} {choosing_key()} {compiles} {generation()}"
    if os.environ.get(RECORD_VARIABLE):
        text = f"{text} {_PROCESS}"  # cached graphs would not be recorded
    if not has_bundles():
        return text
    from ...gemm.aten import settings_key

    # ATen's measured times are valid under some of these settings only.
    return f"{text} {settings_key()} {installed_digest()}"


def log_failure(error: Exception) -> None:
    """Logs once why there is no key. Torch asks for it at every graph."""
    _log_once(f"{type(error).__name__}: {error}")


@functools.cache
def _log_once(failure: str) -> None:
    _log.warning("torch's compile cache keys lack the installed bundles: %s", failure)
