"""Wheels of bundles, written to a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvgemm_aot.bundle.wheel_set import encode_wheels
from nvgemm_aot.storage.files import write_all


def write_wheel(
    bundles: Sequence[Path], *, name: str, version: str, out_dir: Path, summary: str | None = None
) -> Path:
    """Writes what `encode_wheels` gives, and returns the first wheel's path."""
    wheels = encode_wheels(bundles, name=name, version=version, summary=summary)
    write_all({out_dir / wheel.filename: wheel.data for wheel in wheels})
    return out_dir / wheels[0].filename
