"""Entry point that torch calls at its import.

If an entry point cannot be loaded or raises, torch's import fails. So this module needs only the
standard library: a missing or damaged nvgemm-aot part costs one warning.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


def activate() -> None:
    """Adds bundled kernels to torch.compile's choices if nvgemm-aot is installed completely."""
    try:
        import nvgemm_runtime

        # A package whose __init__.py is missing or empty can be imported, but has no version.
        nvgemm_runtime.__version__  # noqa: B018
        from nvgemm_runtime.inductor.autoload import activate as begin

        begin()
    except (KeyboardInterrupt, SystemExit):
        raise  # Ctrl-C, or a signal's handler that ends the program
    except BaseException as error:
        _log.warning(
            "nvgemm-aot is disabled in torch.compile: its installation is incomplete: %s: %s; "
            "run: pip install --force-reinstall --no-deps . in nvgemm-aot's checkout, or with the "
            "path of its wheel in place of the dot",
            *(type(error).__name__, error),
        )
