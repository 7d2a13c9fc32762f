"""Benchmarks' raw files, checked when read, never overwritten."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from nvgemm_aot.storage.files import require_writable, write_atomic
from nvgemm_runtime.errors import NvgemmError

SUFFIX = ".json"
"""Raw files' suffix; tables (.txt) and records (.jsonl) lie beside them."""


def read_record(path: Path, what: str, keys: Mapping[str, type]) -> dict[str, Any]:
    """Reads a raw file and checks its keys."""
    record = read_json(path)
    said = record.get("what")
    if said != what:
        raise click.ClickException(f"{path} is no result of {what} (it says {said!r})")
    for key, kind in keys.items():
        if not isinstance(record.get(key), kind) or not record[key]:
            raise click.ClickException(
                f"{path} has no {key}: it was not written by this benchmark, or nothing was "
                "measured; measure into another file"
            )
    return record


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise click.ClickException(f"{path} is no result: it must hold a JSON object")
    return record


def check_output(path: Path, *, resume: bool = False) -> None:
    """Checks that results can be written, before anything is measured."""
    if path.suffix != SUFFIX:
        raise click.ClickException(
            f"{path}: results go into a file named *{SUFFIX} (got {path.suffix!r}); the table is "
            "written beside it"
        )
    if path.is_dir():
        raise click.ClickException(f"{path} is a directory; name a file")
    if path.exists() and not resume:
        raise click.ClickException(
            f"{path} is there already; give --resume to go on with it where that is an option, or "
            "another name"
        )
    try:
        require_writable(path.parent)
    except NvgemmError as error:
        raise click.ClickException(str(error)) from error


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    try:
        write_atomic(path, text.encode())
    except NvgemmError as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Turns errors in a file's content into an error that names the file."""
    try:
        yield
    except NvgemmError as error:
        raise click.ClickException(str(error)) from error
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise click.ClickException(
            f"{path} is not as this benchmark writes it: {type(error).__name__}: {error}"
        ) from error


def require_gpu() -> None:
    """Checks that there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("no GPU: kernels are measured on the GPU they were built for")
