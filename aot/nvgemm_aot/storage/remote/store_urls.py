"""Opens the store that a URL names."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from nvgemm_runtime.errors import SettingError
from nvgemm_runtime.settings import REMOTE_CACHE_VARIABLE, printable

from .redis_store import RedisStore
from .s3_store import S3Store
from .shared_directory import SharedDirectory
from .signed_entries import MAX_ENTRY_BYTES
from .stores import Store

_LONGEST_CONNECT_SECONDS = 2.0

_REDIS_OVERHEAD_BYTES = 64 << 10
"""Bytes of an answer that are not the value: more than any error text."""


def open_store(text: str, operation_seconds: float) -> Store:
    """Opens a store, without connecting to it.

    Raises:
        SettingError: If the URL is wrong; the message does not repeat it, for it may hold a
            password.
        ToolchainError: If the package that the store needs is missing.
    """
    try:
        url = urlsplit(text)
    except ValueError:
        raise SettingError(f"{REMOTE_CACHE_VARIABLE} is not a URL") from None
    if _has_unquoted(url):
        raise SettingError(
            f"{REMOTE_CACHE_VARIABLE} has a character that a URL must quote: write / as %2F, ? as "
            "%3F, # as %23, @ as %40; S3 takes s3://bucket/prefix without credentials"
        )
    connect_seconds = min(_LONGEST_CONNECT_SECONDS, operation_seconds)
    if url.scheme in ("redis", "rediss"):
        return RedisStore(
            url,
            connect_seconds=connect_seconds,
            operation_seconds=operation_seconds,
            most_bytes=MAX_ENTRY_BYTES + _REDIS_OVERHEAD_BYTES,
        )
    if url.scheme == "s3":
        return S3Store(url, connect_seconds=connect_seconds, operation_seconds=operation_seconds)
    if url.scheme == "file":
        return SharedDirectory(url)
    scheme = printable(url.scheme, 20) or "no scheme"
    raise SettingError(
        f"{REMOTE_CACHE_VARIABLE} has the scheme {scheme}; allowed are redis, rediss, s3, file, "
        "as in s3://bucket/prefix"
    )


def _has_unquoted(url: SplitResult) -> bool:
    """Tells if a part of the URL behind the host may be the rest of a password."""
    return bool(url.fragment) or (url.scheme != "file" and "@" in url.path + url.query)
