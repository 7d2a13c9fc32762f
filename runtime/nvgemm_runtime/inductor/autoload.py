"""Runs at torch's import and waits for the Inductor modules that the plug-in extends.

The entry point group ``torch.backends`` names the module `nvgemm_aot_autoload`, which calls
`activate`. Nothing heavy may be imported here: Inductor alone takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

SUPPORTED = (2, 11), (2, 15)
"""First and last torch release that the plug-in was run with."""

_WAITED_FOR = {
    "torch._inductor.config": "configuration.options",
    "torch._inductor.codegen.common": "configuration.cache_key",
    "torch._inductor.select_algorithm": "entry_point",
    "torch._inductor.fx_passes.post_grad": "fusion.epilogue_fusion",
    "torch._inductor.graph": "fusion.scaled",  # imported after lowering and select_algorithm
    "torch._inductor.package.package": "codegen.operator_loading",
    "torch.export.pt2_archive._package": "codegen.archives",
}
"""Modules here by the torch module whose import installs them."""

EXPERTS = "nvgemm_runtime.moe.block"
"""Module behind which all of the experts' operators are defined. A program may import it late or
never."""

_log = logging.getLogger(__name__)

_logged: set[str] = set()
"""Failures already logged."""


def activate() -> None:
    """Waits for Inductor, unless the user or torch's version forbids it. Never raises."""
    try:
        _activate()
    except Exception as error:
        _log.warning("nvgemm-aot is disabled in torch.compile: %r", error)


def _activate() -> None:
    from ..settings import RECORD_VARIABLE, is_off

    recording = os.environ.get(RECORD_VARIABLE)
    if is_off():
        if recording:
            _log.warning("NVGEMM_AOT=off: nothing is recorded in %s", recording)
        return
    if recording:
        _prepare_recording()
    version = sys.modules["torch"].__version__
    release = tuple(int(part) for part in version.split(".")[:2])
    first, last = SUPPORTED
    if not first <= release <= last:
        # Logged once Inductor is imported, not in every process that imports torch.
        message = (
            f"nvgemm-aot is disabled in torch.compile: torch is {version}, supported is "
            f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        )
        after_import("torch._inductor.select_algorithm", lambda: _log.warning(message))
        return
    for name, module in _WAITED_FOR.items():
        after_import(name, functools.partial(install_module, module))


def _prepare_recording() -> None:
    """Logs an error now if GEMMs cannot be recorded. The first GEMM raises the same error."""
    from ..errors import RecordError
    from ..recording.recorder import named_target, recorder
    from ..settings import RECORD_VARIABLE

    active_recorder = recorder()
    if active_recorder is None:
        return
    # Absolute, so that processes in other directories write the same file.
    os.environ[RECORD_VARIABLE] = str(active_recorder.path)
    try:
        named_target()
        active_recorder.check()
    except RecordError as error:
        _log.error("%s", error)


def install_module(module: str) -> None:
    """Imports a module in this package and installs it. Logs a failure."""
    name = f"{__package__}.{module}"
    try:
        if not hasattr(sys.modules.get(name), "install"):
            # A program that imports this module first imports torch's module from it, so it is
            # half executed here. The new copy replaces it, for the importer too.
            sys.modules.pop(name, None)
        importlib.import_module(name).install()
    except Exception as error:
        log_broken(module, error)


def log_broken(module: str, error: Exception) -> None:
    """Warns that a module cannot be used. Repeats of the same error are logged at debug level."""
    level = logging.DEBUG if repr(error) in _logged else logging.WARNING
    _logged.add(repr(error))
    _log.log(
        level,
        "nvgemm-aot is disabled in torch.compile: %s cannot be installed: %r",
        module,
        error,
        exc_info=_log.isEnabledFor(logging.DEBUG),
    )


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls a function once a module is imported, or now if it already is."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _ImportWatcher(name, function))


class _ImportWatcher(MetaPathFinder):
    """Import finder that calls a function after one module's execution.

    It finds the module through the other finders.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (find := getattr(finder, "find_spec", None)) is not None:
                spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _NotifyingLoader(spec.loader, self._executed)
                    return spec
        return None

    def _executed(self) -> None:
        # Not in `find_spec`: a found module may never be imported.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._function()


class _NotifyingLoader(Loader):
    """Module loader that calls a function after it executes its module."""

    def __init__(self, loader: Loader, function: Callable[[], None]) -> None:
        self._loader = loader
        self._function = function

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The imported module must look the same as without this package.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._function()
