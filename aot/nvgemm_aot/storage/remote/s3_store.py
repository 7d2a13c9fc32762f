"""S3, or a server that speaks its protocol, as the store of a remote cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from nvgemm_runtime.errors import SettingError, ToolchainError, install_command

from .stores import KEY_PREFIX, MAX_CONNECTIONS, Secrets, StoreError, causes

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_MOST_ANSWER_BYTES = 64 << 10
"""Most bytes that are read of an answer that is no object."""

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

_TRANSIENT_STATUSES = (408, 409, 425, 429)
"""HTTP statuses below 500 of errors that another attempt may mend."""

_PERMANENT_STATUSES = (501, 507)
"""HTTP statuses from 500 on of errors that it cannot mend. 507 is a full disk."""

_TRANSIENT_CODES = (
    *("RequestTimeout", "RequestTimeoutException", "SlowDown", "RequestLimitExceeded"),
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled"),
    *("RequestThrottledException", "TooManyRequestsException", "BandwidthLimitExceeded"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),  # bytes changed on the way
)
"""Codes of errors that another attempt may mend, whatever the status: often 400."""


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
            if not str(error).startswith("AccessDenied"):
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
            if any(answer.code == "NoSuchBucket" for answer in _error_answers(error)):
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
        if (answer := next(_error_answers(error), None)) is not None:
            message = self._secrets.hide(answer.message)  # radosgw sends none
            code = self._secrets.hide(answer.code) or f"status {answer.status}"
            text = f"{code}: {message}" if message else code
            return StoreError(text, is_transient=answer.is_transient)
        chain = list(causes(error))
        if any(isinstance(one, (TimeoutError, asyncio.TimeoutError)) for one in chain):
            return StoreError(f"no answer within {self._seconds:g} s", is_transient=True)
        is_permanent = any(type(one).__name__ in _PERMANENT for one in chain)
        return StoreError(self._secrets.error_text(error), is_transient=not is_permanent)


def _bounded_class(base: Any) -> Any:
    """Returns a session class that reads `_MOST_ANSWER_BYTES` of an answer that is no object.

    aiobotocore reads the whole body of an error, and of every answer to a write.
    """

    class BoundedSession(base):  # type: ignore[misc]
        async def send(self, request: Any) -> Any:
            has_object = request.stream_output
            request.stream_output = True  # leaves the body unread
            answer = await super().send(request)
            if answer.status_code >= 300 or not has_object:
                data = bytearray()
                try:
                    while len(data) <= _MOST_ANSWER_BYTES and (
                        part := await answer.raw.content.read(_MOST_ANSWER_BYTES + 1 - len(data))
                    ):
                        data += part
                except BaseException:
                    answer.raw.close()
                    raise
                if len(data) > _MOST_ANSWER_BYTES:
                    answer.raw.close()
                answer._content = bytes(data)
            return answer

    return BoundedSession


class _ErrorAnswer(NamedTuple):
    """An error that the server reported."""

    status: int
    code: str
    message: str

    @property
    def is_transient(self) -> bool:
        """True if another attempt may succeed."""
        if self.status >= 500:
            return self.status not in _PERMANENT_STATUSES
        return self.status in _TRANSIENT_STATUSES or self.code in _TRANSIENT_CODES


def _error_answers(error: BaseException) -> Iterator[_ErrorAnswer]:
    """Yields what the server reported, as botocore read it."""
    for one in causes(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict) and isinstance(details := response.get("Error"), dict):
            status = int((response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 500)
            code, message = (str(details.get(name) or "") for name in ("Code", "Message"))
            yield _ErrorAnswer(status, code[:40] if code.isalnum() else f"status {status}", message)


def _endpoint_text() -> str:
    """Returns the endpoint that the environment names, without credentials."""
    name = next((v for v in map(os.environ.get, _ENDPOINT_VARIABLES) if v), None)
    if name is None:
        return ""
    url = urlsplit(name)
    return f" at {url.scheme}://{url.netloc.rpartition('@')[2]}"
