"""Ties torch's compile caches to the installed bundles.

Torch hashes each custom backend pass's ``uuid`` into the keys of its FX-graph and AOTAutograd
caches. The pass here never runs. Its ``uuid`` is `choices_key`, so a graph is recompiled when other
bundles are installed. These keys contain Inductor's options too, but torch reads those only once
unless an option is set.
"""

from __future__ import annotations

import os
import secrets

from torch._inductor import config
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphModulePass

from ...installed import digest
from ...settings import KEY_OPTION, RECORD_VARIABLE, serves_default_mode
from ..codegen import operator_loading
from .choices_key import choices_key, log_failure

_KEY = "nvgemm_aot"
"""The pass's key, where torch expects a device name. No device has this name."""


class CacheKeyPass(CustomGraphModulePass):  # type: ignore[misc]
    """Pass that never runs; its ``uuid`` identifies the choices that this process offers."""

    def __call__(self, gm: object) -> None:
        """Does nothing."""

    def uuid(self) -> str:
        """Returns a digest of the installed bundles and the settings, equal for all graphs."""
        if os.environ.get(RECORD_VARIABLE):
            return f"{_KEY} {secrets.token_hex()}"  # cached graphs would not be recorded
        self._prepare_to_run()
        key = choices_key()
        setattr(config, KEY_OPTION, key)  # ignored, but makes torch read the option again
        return f"{_KEY} {key}"

    def _prepare_to_run(self) -> None:
        """Loads the operators for generated C++. Torch asks before it runs a cached graph."""
        try:
            if config.cpp_wrapper and may_have_kernels():
                operator_loading.try_to_load_operators()
        except Exception as error:
            log_failure(error)


def may_have_kernels() -> bool:
    """Returns True if a graph compiled now may call bundled kernels."""
    if config.max_autotune or config.max_autotune_gemm:
        return True
    return serves_default_mode() and digest.has_bundles()


def install() -> None:
    """Registers the pass."""
    custom_backend_passes[_KEY] = CacheKeyPass()
