"""The builder and the ``nvgemm-aot`` command: compiles GEMM kernels and packs them into wheels.

No GPU is needed, but by `tuning`. Start at `build.pipeline`, or at `cli.main`. It may import
`nvgemm_runtime`, but for its `inductor` and `jit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvgemm_runtime import __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    # Nothing is imported before the command has seen to interrupts.
    if name == "__version__":
        from nvgemm_runtime import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
