"""Mode in which GEMMs are compiled, set for the process, a block or one ``torch.compile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...errors import SettingError
from ...settings import (
    COMPILE_OPTION,
    FUSE_OPTION,
    MODE_VARIABLE,
    Mode,
    checked_mode,
    fuses_gates,
    named_mode,
)

OPTION = COMPILE_OPTION
"""Name among Inductor's options; see `options`."""


def current_mode() -> Mode:
    """Returns the mode for the current compilation.

    Raises:
        SettingError: If the option or NVGEMM_AOT has an unknown value.
    """
    from torch._inductor import config

    return checked_mode(getattr(config, OPTION, named_mode()), OPTION)


def may_fuse_gates() -> bool:
    """Returns True if the current compilation may fuse gated products without max-autotune."""
    from torch._inductor import config

    return bool(getattr(config, FUSE_OPTION, fuses_gates()))


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """Compiles in another mode inside a block.

    ``torch.compile`` compiles at the first call, and gradients at the first ``backward()``. Code
    that was compiled before the block does not change. ``torch.compile(model,
    options={"nvgemm_aot_mode": name})`` sets the mode for one model, wherever it is called.

    Args:
        name: ``auto``, ``required`` or ``off``; see `nvgemm_runtime.settings.Mode`.

    Raises:
        SettingError: If the name is unknown, or the plug-in is not active because
            ``NVGEMM_AOT=off`` was set when torch was imported or torch's release is not supported.
    """
    new_mode = checked_mode(name, OPTION)
    from torch._inductor import config

    if OPTION not in config.get_config_copy():
        if new_mode is Mode.OFF:
            yield
            return
        raise SettingError(
            f"mode is {name!r}, but nvgemm-aot is not active in this process: "
            f"{MODE_VARIABLE} was off when torch was imported, or torch's release is not "
            "supported; run nvgemm-aot doctor"
        )
    with config.patch({OPTION: new_mode.value}):
        yield
