"""Ties torch's compile caches to what is installed.

Torch hashes the ``uuid`` of every custom backend pass into the keys of its FX-graph and AOTAutograd
caches. The pass here is never run; its ``uuid`` is `choices_key`, so that a graph that was compiled
with other bundles is compiled again. These keys contain Inductor's options too, but as torch read
them before, unless one was set since.
"""

from __future__ import annotations

import os
import secrets

from torch._inductor import config
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphModulePass

from ..installed import digest
from ..settings import KEY_OPTION, RECORD_VARIABLE, serves_default_mode
from . import operators
from .choices_key import choices_key, log_failure

_KEY = "nvgemm_aot"
"""Key of the pass, where torch expects a device's name: no device has this one."""


class CacheKeyPass(CustomGraphModulePass):  # type: ignore[misc]
    """A pass that is never run; its ``uuid`` identifies the choices that this process offers."""

    def __call__(self, gm: object) -> None:
        """Do nothing."""

    def uuid(self) -> str:
        """A digest of the installed bundles and the settings; the same for any graph."""
        if os.environ.get(RECORD_VARIABLE):
            return f"{_KEY} {secrets.token_hex()}"  # a graph from a cache would not be recorded
        self._prepare_to_run()
        key = choices_key()
        setattr(config, KEY_OPTION, key)  # ignored; torch reads the option anew from now on
        return f"{_KEY} {key}"

    def _prepare_to_run(self) -> None:
        """Load the operators that generated C++ calls: torch asks before it runs a cached graph."""
        try:
            if config.cpp_wrapper and may_have_kernels():
                operators.try_to_load_operators()
        except Exception as error:
            log_failure(error)


def may_have_kernels() -> bool:
    """Returns True if a graph that is compiled now may call bundled kernels."""
    if config.max_autotune or config.max_autotune_gemm:
        return True
    return serves_default_mode() and digest.has_bundles()


def install() -> None:
    """Register the pass."""
    custom_backend_passes[_KEY] = CacheKeyPass()
