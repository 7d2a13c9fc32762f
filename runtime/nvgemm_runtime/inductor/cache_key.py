"""Ties torch's compile caches to what is installed.

Torch hashes the ``uuid`` of every custom backend pass into the keys of its FX-graph and AOTAutograd
caches. The pass here is never run; its ``uuid`` names the installed bundles, so that a graph that
was compiled with other bundles is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import sys

from torch._inductor import config
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphModulePass

from ..settings import RECORD_VARIABLE, choosing_key, jit_candidates, serves_default_mode
from . import operators
from .autoload import EXPERTS

_KEY = "nvgemm_aot"
"""Key of the pass, where torch expects a device's name: no device has this one."""

_log = logging.getLogger(__name__)


class CacheKeyPass(CustomGraphModulePass):  # type: ignore[misc]
    """A pass that is never run; its ``uuid`` identifies the choices that this process offers."""

    def __call__(self, gm: object) -> None:
        """Do nothing."""

    def uuid(self) -> str:
        """A digest of the installed bundles and the settings; the same for any graph."""
        if os.environ.get(RECORD_VARIABLE):
            return f"{_KEY} {secrets.token_hex()}"  # a graph from a cache would not be recorded
        try:
            return _key_with_choices() if _depends_on_bundles() else _KEY
        except Exception as error:
            # Raising would fail the compilation. Whatever broke the digest breaks choices too.
            _log_failure(f"{type(error).__name__}: {error}")
            return f"{_KEY} unknown"


def _depends_on_bundles() -> bool:
    """Whether a graph may be another with other bundles.

    Experts are traced with kernels that have their gate in every mode. No graph is seen here, so
    the module that is imported for them says that one may have some.
    """
    if config.max_autotune or config.max_autotune_gemm or EXPERTS in sys.modules:
        return True
    return serves_default_mode() and has_bundles()


def _key_with_choices() -> str:
    if config.cpp_wrapper:
        # Torch asks for the key also before it runs a cached graph, whose code needs the operators.
        operators.try_to_load_operators()
    from .. import __version__
    from ..gemm.aten import settings_key
    from ..installed.jit_cache import generation
    from ..jit import client

    # Without the JIT cache's content: it grows with compilation, and graphs stay right until a
    # kernel is removed, which changes the generation.
    compiles = jit_candidates() if client.missing_module() is None else 0
    # ATen's measured times count under some of these settings only.
    settings = f"{choosing_key()} {compiles} {settings_key()}"
    return f"{_KEY} {__version__} {settings} {generation()} {installed_digest()}"


@functools.cache
def _log_failure(failure: str) -> None:
    """Log a failure once: torch asks for the key at every graph."""
    _log.warning("torch's compile caches do not know the installed bundles: %s", failure)


@functools.cache
def installed_digest() -> str:
    """Digest over the headers of all bundles, read once a process.

    A bundle that cannot be opened adds the reason, so that the plug-in still runs and reports it.
    """
    from ..installed.discover import find_bundles

    digest = hashlib.sha256()
    for found in find_bundles():
        opened = found.problem is None
        digest.update(_header_identity(found.path) if opened else str(found.problem).encode())
    return digest.hexdigest()


def has_bundles() -> bool:
    """Whether any bundle is installed."""
    return installed_digest() != hashlib.sha256().hexdigest()


def _header_identity(path: object) -> bytes:
    """A bundle's first bytes, with the digest of its header, which has one of the rest."""
    from ..bundle.format import PREFIX

    try:
        with open(str(path), "rb") as file:  # noqa: PTH123
            return file.read(PREFIX.size)
    except OSError as error:
        _log.debug("%s is not part of the cache key: %s", path, error)
        return b""


def install() -> None:
    """Register the pass."""
    custom_backend_passes[_KEY] = CacheKeyPass()
