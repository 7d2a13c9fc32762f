"""C++ libraries that Inductor compiles, of which a session compiles none twice."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import codecache


def share_libraries(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let Inductor take libraries from a directory, and put there what it compiles.

    A library's name has the digest of its code and of its compiler's command. Tests that empty
    torch's caches compile the same few kernels, for half a second each.
    """
    compile_all = codecache._worker_compile_cpp

    def compile_missing(lock_path: str, builders: Sequence[Any]) -> None:
        made = [Path(one.get_target_file_path()) for one in builders]
        files = [(one, directory / one.name) for one in made if one.suffix in (".so", ".o")]
        for own, shared in files:
            if shared.exists():
                shutil.copyfile(shared, own)
        compile_all(lock_path, builders)
        for own, shared in files:
            if own.exists() and not shared.exists():
                written = shared.with_name(f"{shared.name}.{own.parents[1].name}")
                shutil.copyfile(own, written)
                written.replace(shared)

    patch.setattr(codecache, "_worker_compile_cpp", compile_missing)
