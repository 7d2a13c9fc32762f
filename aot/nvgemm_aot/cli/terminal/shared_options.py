"""Options and parameter types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from nvgemm_runtime.gemm.target import ORDERED_ARCHITECTURES, TargetName

if TYPE_CHECKING:
    from ...pipeline.shard import Shard

Command = TypeVar("Command", bound=Callable[..., Any])

ANY_PATH = click.Path(path_type=Path)
"""A path that may be missing: the command reports that with its own error and exit code."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def cache_option(noun: str) -> Callable[[Command], Command]:
    """Returns the option ``--cache-dir``; ``noun`` names the directory in its help."""
    return click.option(
        "--cache-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help=f"{noun}; default $NVGEMM_AOT_CACHE or the user's cache directory.",
    )


def out_directory_option(text: str) -> Callable[[Command], Command]:
    """Returns the option ``--out``, a directory, with this help text."""
    return click.option(
        "-o",
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("dist"),
        show_default=True,
        help=text,
    )


ARCHITECTURE_NAMES = ", ".join(ORDERED_ARCHITECTURES)
"""Allowed beginnings of a target, for help texts."""


class TargetNameParam(click.ParamType):  # type: ignore[type-arg]
    """A target by its architecture, alone or with platform and CUDA version; see `TargetName`."""

    name = "target"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> TargetName:
        """Parses the text."""
        if isinstance(value, TargetName):
            return value
        try:
            return TargetName.parse(str(value))
        except ValueError as error:
            self.fail(f"no provider builds for {str(value)[:40]!r}; {error}", param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, from a text such as ``90s`` or ``30d``.

    Args:
        number: Regular expression for the number.
        units: Seconds per unit suffix.
        complaint: Error message for any other text.
    """

    name = "duration"

    def __init__(self, number: str, units: Mapping[str, int], complaint: str) -> None:
        self._form = re.compile(f"({number})([{''.join(units)}])")
        self._units = units
        self._complaint = complaint

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parses the text."""
        match = self._form.fullmatch(str(value))
        if match is None:
            self.fail(f"{str(value)[:20]!r} {self._complaint}", param, ctx)
        return float(match[1]) * self._units[match[2]]


class ByteCount(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, from a text such as ``90M``, 90 million, or ``95MiB``, 95 times 2^20."""

    name = "size"

    _FORM = re.compile(r"(\d+(?:\.\d+)?)(?:([kMG])(i?))?B?")
    _POWERS: ClassVar = {"k": 1, "M": 2, "G": 3}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the text."""
        if isinstance(value, int):
            return value
        match = self._FORM.fullmatch(str(value))
        if match is None:
            self.fail(f"{str(value)[:20]!r} is not a size such as 90M or 95MiB", param, ctx)
        base = 1024 if match[3] else 1000
        count = int(float(match[1]) * base ** self._POWERS.get(match[2], 0))
        if count < 1:
            self.fail(f"{str(value)[:20]!r} is less than one byte", param, ctx)
        return count


class ShardParam(click.ParamType):  # type: ignore[type-arg]
    """One of several parts, such as ``2/8``; see `Shard`."""

    name = "i/n"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Shard:
        """Parses the text."""
        from ...pipeline.shard import Shard

        try:
            return value if isinstance(value, Shard) else Shard.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
