"""S3, or a server that speaks its protocol, as the store of a remote cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from nvgemm_runtime.errors import SettingError, ToolchainError, install_command

from .stores import KEY_PREFIX, MAX_CONNECTIONS, Secrets, StoreError, causes

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_MOST_ERROR_BYTES = 64 << 10
"""Most bytes that are read of an answer that is an error or a redirection."""

_READ_PERMISSIONS = "reading needs s3:GetObject and s3:ListBucket"
"""Without s3:ListBucket, S3 answers AccessDenied for absent objects."""

_PERMANENT = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "ProfileNotFound",
    "SSLError",
)
"""Names of botocore's errors that another attempt cannot mend."""


class S3Store:
    """Values as objects ``s3://bucket/prefix/…``. Credentials and endpoint are botocore's to find.

    Args:
        url: ``s3://bucket`` or ``s3://bucket/prefix``.
        connect_seconds: Longest time to connect.
        operation_seconds: Longest time for an operation, connecting included.

    Raises:
        SettingError: If the URL is wrong.
        ToolchainError: If the package s3fs is missing.
    """

    def __init__(
        self, url: SplitResult, *, connect_seconds: float, operation_seconds: float
    ) -> None:
        if not url.netloc or url.query or not {*"@:"}.isdisjoint(url.netloc):
            raise SettingError(
                "the remote cache's URL is wrong: S3 takes s3://bucket/prefix; credentials, region "
                "and endpoint come from AWS's variables or files"
            )
        try:
            import s3fs
            from aiobotocore.httpsession import AIOHTTPSession
            from fsspec.asyn import sync
        except ImportError as error:
            raise ToolchainError(
                f"the remote cache needs s3fs: {error}; {install_command('fleet')}"
            ) from None
        for name in ("botocore", "aiobotocore", "s3fs"):  # finer lines hold session tokens
            if (logger := logging.getLogger(name)).level == logging.NOTSET:
                logger.setLevel(logging.WARNING)
        self._sync = sync
        self._seconds = operation_seconds
        self._secrets = Secrets(url)
        self._bucket = url.netloc
        prefix = unquote(url.path).strip("/")
        self._prefix = (f"{prefix}/" if prefix else "") + KEY_PREFIX
        self.address = f"s3://{url.netloc}/{prefix}".rstrip("/") + _endpoint_text()
        self._files: Any = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "http_session_cls": _bounded_class(AIOHTTPSession),
                "connect_timeout": connect_seconds,
                "read_timeout": operation_seconds,
                "retries": {"max_attempts": 0},
                "max_pool_connections": MAX_CONNECTIONS,
                # Entries carry a digest of their own, and servers other than AWS's refuse these.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        self._files.retries = 1  # attempts

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Reads an object; see `Store.get`."""
        try:
            data: bytes | None = self._run(self._read(key, most_bytes))
        except StoreError as error:
            if not str(error).startswith("AccessDenied: "):
                raise
            reason = f"{error}; {_READ_PERMISSIONS}"
            raise StoreError(reason, is_transient=error.is_transient) from None
        return data

    def put(self, key: str, data: bytes) -> None:
        """Stores an object; see `Store.put`."""
        self._run(self._call("put_object", key, Body=data))

    def close(self) -> None:
        """Closes connections."""
        with contextlib.suppress(Exception):
            self._files.close_session(self._files.loop, self._files._s3creator)

    async def _read(self, key: str, most_bytes: int) -> bytes | None:
        try:
            answer = await self._call("get_object", key)
        except FileNotFoundError as error:
            if "NoSuchBucket" in map(_code, causes(error)):
                raise
            return None
        parts, size = [], 0
        async with answer["Body"] as body:
            while size <= most_bytes and (part := await body.read(most_bytes + 1 - size)):
                parts.append(part)
                size += len(part)
        return b"".join(parts)

    async def _call(self, method: str, key: str, **arguments: Any) -> Any:
        return await self._files._call_s3(
            method, Bucket=self._bucket, Key=self._prefix + key, **arguments
        )

    def _run(self, operation: Any) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(operation, self._seconds)

        try:
            return self._sync(self._files.loop, limited)
        except Exception as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> StoreError:
        chain = list(causes(error))
        names = [type(one).__name__ for one in chain]
        is_refused = any(isinstance(one, (PermissionError, FileNotFoundError)) for one in chain)
        if any(isinstance(one, (TimeoutError, asyncio.TimeoutError)) for one in chain):
            return StoreError(f"no answer within {self._seconds:g} s", is_transient=True)
        code = next(filter(None, map(_code, chain)), None)
        text = (f"{code}: " if code else "") + self._secrets.error_text(error)
        is_permanent = is_refused or not {*names}.isdisjoint(_PERMANENT)
        return StoreError(text, is_transient=not is_permanent)


def _bounded_class(base: Any) -> Any:
    """Returns a session class that reads no error further than `_MOST_ERROR_BYTES`.

    aiobotocore reads the whole body of an answer whose status is 300 or more.
    """

    class BoundedSession(base):  # type: ignore[misc]
        async def send(self, request: Any) -> Any:
            answer = await super().send(request)
            if answer.status_code >= 300:
                data = bytearray()
                while len(data) <= _MOST_ERROR_BYTES and (
                    part := await answer.raw.content.read(_MOST_ERROR_BYTES + 1 - len(data))
                ):
                    data += part
                if len(data) > _MOST_ERROR_BYTES:
                    answer.raw.close()
                answer._content = bytes(data)
            return answer

    return BoundedSession


def _code(error: BaseException) -> str | None:
    """Returns the code of an error that the server reported."""
    response = getattr(error, "response", None)
    details = response.get("Error") if isinstance(response, dict) else None
    code = details.get("Code") if isinstance(details, dict) else None
    return code[:40] if isinstance(code, str) and code.isalnum() else None


def _endpoint_text() -> str:
    """Returns the endpoint that the environment names, without credentials."""
    name = next((v for v in map(os.environ.get, _ENDPOINT_VARIABLES) if v), None)
    if name is None:
        return ""
    url = urlsplit(name)
    return f" at {url.scheme}://{url.netloc.rpartition('@')[2]}"
