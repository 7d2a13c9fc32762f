"""Adds options to Inductor's own: ``torch.compile(model, options={"nvgemm_aot_mode": …})``.

This is a config module, like ``torch._inductor.config``; `install` adds its entries to Inductor's.
They can be passed as options or patched, and are part of cache keys: torch's, and those of programs
that read ``torch._inductor.config.save_config_portable()``, as vLLM does. ``nvgemm_aot_key`` cannot
be set; see `choices_key`. A config module may hold only functions, modules and options.
"""

import sys

from torch.utils._config_module import install_config_module

from ... import settings
from . import choices_key, computed_option

nvgemm_aot_mode: str = settings.named_mode()

nvgemm_aot_fuse: bool = settings.fuses_gates()

nvgemm_aot_key: str = ""

install_config_module(sys.modules[__name__])


def install() -> None:
    """Adds the options to Inductor's own."""
    from torch._inductor import config

    module = sys.modules[__name__]
    computed_option.compute(module._config[settings.KEY_OPTION], choices_key.choices_key)
    config._config.update(module._config)
