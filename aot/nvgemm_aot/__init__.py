"""The builder and the ``nvgemm-aot`` command: compiles GEMM kernels and packs them into wheels.

Only `tuning` needs a GPU. Start at `pipeline.pipeline` or `cli.main`. The package may import
`nvgemm_runtime`, except its `inductor` and `jit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvgemm_runtime import __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    # Importing anything must wait until the command has set its interrupt handler.
    if name == "__version__":
        from nvgemm_runtime import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
