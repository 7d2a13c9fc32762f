"""Reads single values in a bundle's header, by FORMAT.md's rules for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..errors import BundleFormatError

_T = TypeVar("_T")


class HeaderValues:
    """Checks a file's values; each comes with its path in the header.

    Args:
        where: File name, for messages.

    Raises:
        BundleFormatError: In every method, naming the rule, the observed value and the allowed one.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, rule: str, message: str) -> NoReturn:
        """Rejects the file for a broken FORMAT.md rule."""
        raise BundleFormatError(self.where, rule, message)

    def refuse(self, path: str, allowed: str, value: object) -> NoReturn:
        """Rejects a value that is not allowed."""
        self.fail("header-field", f"{path} must be {allowed} (got {value!r:.80})")

    def fields(self, value: Any, path: str, required: frozenset[str]) -> dict[str, Any]:
        """Reads an object that has all required members; it may have others."""
        if not isinstance(value, dict):
            self.refuse(path, "an object", value)
        if not required <= value.keys():
            missing = ", ".join(sorted(required - value.keys()))
            self.fail("header-field", f"{path} lacks {missing}, which it must have")
        return value

    def texts(self, value: Any, path: str, required: frozenset[str]) -> dict[str, str]:
        """Reads an object's required members, which must be texts."""
        fields = self.fields(value, path, required)
        return {name: self.text(fields[name], f"{path}.{name}") for name in required}

    def text(self, value: Any, path: str) -> str:
        """Reads non-empty printable text."""
        if not isinstance(value, str) or not value or not value.isprintable():
            self.refuse(path, "non-empty printable text", value)
        return value

    def digest(self, value: Any, path: str) -> str:
        """Reads a sha256, as 64 lower-case hex digits."""
        text = self.text(value, path)
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            self.refuse(path, "64 lower-case hex digits", text)
        return text

    def number(self, value: Any, path: str, least: int = 0, most: int = 2**63 - 1) -> int:
        """Reads an integer in ``least..most``."""
        if type(value) is not int or not least <= value <= most:
            self.refuse(path, f"an integer in {least}..{most}", value)
        return value

    def items(self, value: Any, path: str, length: int | None = None) -> list[Any]:
        """Reads a list, optionally with a fixed length."""
        if not isinstance(value, list) or (length is not None and len(value) != length):
            self.refuse(path, "a list" if length is None else f"a list of {length}", value)
        return value

    def each(
        self, value: Any, path: str, read: Callable[[Any, str], _T], length: int | None = None
    ) -> tuple[_T, ...]:
        """Reads each item in a list, optionally with a fixed length."""
        items = self.items(value, path, length)
        return tuple(read(item, f"{path}[{i}]") for i, item in enumerate(items))

    def flag(self, value: Any, path: str) -> bool:
        """Reads true or false."""
        if not isinstance(value, bool):
            self.fail("header-field", f"{path} must be true or false (got {value!r})")
        return value

    def pair(self, value: Any, path: str, most: int = 2**63 - 1) -> tuple[int, int]:
        """Reads two integers in ``1..most``: along m and along n."""
        along_m, along_n = self.items(value, path, 2)
        return (
            self.number(along_m, f"{path}[0]", 1, most),
            self.number(along_n, f"{path}[1]", 1, most),
        )

    def extent(self, value: Any, path: str) -> int:
        """Reads an integer of at least 1."""
        return self.number(value, path, least=1)
