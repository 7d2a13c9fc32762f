"""Stores of a remote cache: what each does, how it fails, and texts without credentials."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, unquote

from nvgemm_runtime.errors import one_line

KEY_PREFIX = "nvgemm-aot/1/"
"""Beginning of every key in a store, with the version of what lies behind it."""

MAX_CONNECTIONS = 16
"""Most operations at once, and so most connections and most entries held in memory."""

_SHORTEST_REPLACED = 4
"""Shortest secret, in characters, that is replaced in a text; a shorter one hides the text."""

_MOST_SHOWN = 200

_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class StoreError(Exception):
    """A store failed. The text names the reason and holds no credentials.

    Attributes:
        is_transient: True if another attempt may succeed.
    """

    def __init__(self, reason: str, *, is_transient: bool) -> None:
        super().__init__(reason)
        self.is_transient = is_transient


class Store(Protocol):
    """A place for bytes by key, used by several threads at once."""

    @property
    def address(self) -> str:
        """Scheme, host and path, without credentials."""

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Reads a value's first ``most_bytes`` + 1 bytes; returns None if there is none.

        Raises:
            StoreError: If the store failed.
        """

    def put(self, key: str, data: bytes) -> None:
        """Stores a value, whole or not at all.

        Raises:
            StoreError: If the store failed.
        """

    def close(self) -> None:
        """Closes connections. Never raises."""


class Secrets:
    """Texts that no message may show. Has no text form of its own."""

    def __init__(self, url: SplitResult) -> None:
        userinfo = url.netloc.rpartition("@")[0]
        values = (userinfo, *userinfo.split(":", 1), *(v for _, v in parse_qsl(url.query)))
        environment = (os.environ.get(name, "") for name in _SECRET_VARIABLES)
        texts = {text for value in (*values, *environment) for text in (value, unquote(value))}
        self._texts = sorted(filter(None, texts), key=len, reverse=True)

    def error_text(self, error: BaseException) -> str:
        """Describes an error of a library in one line, without secrets."""
        text = self.hide(str(error))
        name = type(error).__name__
        return f"{name}: {text}" if text else name

    def hide(self, text: str) -> str:
        """Returns a text in one line, without secrets; empty if it has one too short to replace."""
        for secret in self._texts:
            if secret in text and len(secret) < _SHORTEST_REPLACED:
                return ""
            text = text.replace(secret, "***")
        return one_line(text)[:_MOST_SHOWN]  # a secret may have what one_line changes


def causes(error: BaseException) -> Iterable[BaseException]:
    """Yields an error and what caused it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__
