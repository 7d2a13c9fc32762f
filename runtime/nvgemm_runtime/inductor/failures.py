"""Logs an internal error once and lets compilation continue without bundled kernels."""

from __future__ import annotations

import logging

from ..errors import NvgemmError

_log = logging.getLogger(__name__)

_logged: set[str] = set()


def survive(error: Exception) -> None:
    """Raise an error that must stop the compilation; log any other."""
    if isinstance(error, NvgemmError) and error.stops_compilation:
        raise error
    log_failure(error)


def log_failure(error: Exception) -> None:
    """Log an internal error, once: what fails for one GEMM mostly fails for all."""
    failure = f"{type(error).__name__}: {error}"
    if failure in _logged:
        return
    _logged.add(failure)
    _log.warning(
        "bundled kernels stay out of the choices: %s; this is a mistake of nvgemm-aot, please "
        "report it",
        failure,
        exc_info=True,
    )
