"""The mode in which GEMMs are compiled: of the process, of a block, or of one ``torch.compile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import SettingError
from ..settings import COMPILE_OPTION, MODE_VARIABLE, Mode, checked_mode, named_mode

OPTION = COMPILE_OPTION
"""Among Inductor's options; see `options`."""


def current_mode() -> Mode:
    """The mode of the compilation that is running.

    Raises:
        SettingError: If the option, or NVGEMM_AOT, has a value that is no mode.
    """
    from torch._inductor import config

    return checked_mode(getattr(config, OPTION, named_mode()), OPTION)


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """Compile in another mode for as long as a block runs.

    ``torch.compile`` compiles at the first call, and gradients at the first ``backward()``; what
    was compiled before the block runs as it is. ``torch.compile(model, options={"nvgemm_aot_mode":
    name})`` sets the mode of one model, wherever that is called.

    Args:
        name: ``auto``, ``required`` or ``off``; see `nvgemm_runtime.settings.Mode`.

    Raises:
        SettingError: If the name is none of them, or ``NVGEMM_AOT=off`` kept the plug-in out when
            torch was imported, or torch's release is not supported.
    """
    wanted = checked_mode(name, OPTION)
    from torch._inductor import config

    if OPTION not in config.get_config_copy():
        if wanted is Mode.OFF:
            yield
            return
        raise SettingError(
            f"mode is {name!r}, but nvgemm-aot is not in torch.compile in this process: "
            f"{MODE_VARIABLE} was off when torch was imported, or torch's release is not "
            "supported; see nvgemm-aot doctor"
        )
    with config.patch({OPTION: wanted.value}):
        yield
