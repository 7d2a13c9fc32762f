"""The option that joins Inductor's own: ``torch.compile(model, options={"nvgemm_aot_mode": …})``.

This is a config module, like ``torch._inductor.config``; `install` adds its entry to Inductor's.
There it can be given as an option or patched, and is part of the keys of the compile caches. A
config module may hold nothing but functions, modules and options.
"""

import sys

from torch.utils._config_module import install_config_module

from ..settings import default_mode

nvgemm_aot_mode: str = default_mode().value

install_config_module(sys.modules[__name__])


def install() -> None:
    """Add the option to Inductor's own."""
    from torch._inductor import config

    own = sys.modules[__name__]
    config._config.update(own._config)
