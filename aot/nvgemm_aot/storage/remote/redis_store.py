"""Redis as the store of a remote cache, over TCP or TLS."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from urllib.parse import SplitResult

from nvgemm_runtime.errors import SettingError, ToolchainError, install_command

from .stores import KEY_PREFIX, MAX_CONNECTIONS, Secrets, StoreError


class RedisStore:
    """Values as Redis strings, which never expire by themselves.

    Args:
        url: ``redis://`` or ``rediss://``, as redis-py takes it.
        connect_seconds: Longest time to connect.
        operation_seconds: Longest time from a command to the end of its answer.
        most_bytes: Most bytes of an answer.

    Raises:
        SettingError: If the URL is wrong.
        ToolchainError: If the package redis is missing.
    """

    def __init__(
        self, url: SplitResult, *, connect_seconds: float, operation_seconds: float, most_bytes: int
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.connection import parse_url
            from redis.retry import Retry
        except ImportError as error:
            raise ToolchainError(
                f"the remote cache needs redis: {error}; {install_command('fleet')}"
            ) from None
        self._redis: Any = redis
        self._secrets = Secrets(url)
        try:
            options = dict(parse_url(url.geturl()))
            host, port = options.get("host", "localhost"), options.get("port", 6379)
            self.address = f"{url.scheme}://{host}:{port}/{options.get('db', 0)}"
            options.pop("connection_class", None)
            self._pool: Any = redis.BlockingConnectionPool(
                connection_class=_bounded_class(
                    redis.SSLConnection if url.scheme == "rediss" else redis.Connection,
                    operation_seconds,
                    most_bytes,
                ),
                max_connections=MAX_CONNECTIONS,
                timeout=operation_seconds,
                **{
                    "socket_connect_timeout": connect_seconds,
                    "socket_timeout": operation_seconds,
                    "retry": Retry(NoBackoff(), 0),
                    **options,
                },
            )
            self._pool.connection_class(**self._pool.connection_kwargs)  # refuses unknown options
        except (ValueError, TypeError, redis.RedisError) as error:
            reason = self._secrets.error_text(error)
            raise SettingError(f"the remote cache's URL is wrong: {reason}") from None
        self._client: Any = redis.Redis(connection_pool=self._pool)

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Reads a value; see `Store.get`. An empty value counts as absent."""
        try:
            data = self._client.getrange(KEY_PREFIX + key, 0, most_bytes)
        except Exception as error:
            raise self._failure(error) from None
        if not isinstance(data, bytes):
            raise StoreError(f"it answers with {type(data).__name__}", is_transient=False)
        return data or None

    def put(self, key: str, data: bytes) -> None:
        """Stores a value; see `Store.put`."""
        try:
            self._client.set(KEY_PREFIX + key, data)
        except Exception as error:
            raise self._failure(error) from None

    def close(self) -> None:
        """Closes all connections."""
        with contextlib.suppress(Exception):
            self._pool.disconnect()

    def _failure(self, error: Exception) -> StoreError:
        # redis-py's ConnectionError is the base class of errors in logging in, which stay.
        kinds = (self._redis.ConnectionError, self._redis.TimeoutError, OSError)
        is_transient = isinstance(error, kinds) and not isinstance(
            error, self._redis.AuthenticationError
        )
        return StoreError(self._secrets.error_text(error), is_transient=is_transient)


class _AnswerTooLongError(Exception):
    """A server's answer has more bytes than an entry can have."""


class _BoundedSocket:
    """A socket whose answers are bounded in bytes and in time, whatever the server sends."""

    def __init__(self, sock: Any, seconds: float, most_bytes: int) -> None:
        self._sock = sock
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._restart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, *arguments: Any) -> None:
        self._restart()
        self._sock.sendall(*arguments)

    def recv(self, *arguments: Any) -> bytes:
        data: bytes = self._sock.recv(*arguments)
        self._count(len(data))
        return data

    def recv_into(self, *arguments: Any) -> int:
        count: int = self._sock.recv_into(*arguments)
        self._count(count)
        return count

    def _restart(self) -> None:
        self._received = 0
        self._end = time.monotonic() + self._seconds

    def _count(self, received: int) -> None:
        self._received += received
        if self._received > self._most_bytes:
            raise _AnswerTooLongError(f"its answer has more than {self._most_bytes} bytes")
        if time.monotonic() > self._end:
            raise TimeoutError(f"its answer takes longer than {self._seconds:g} s")


def _bounded_class(base: Any, seconds: float, most_bytes: int) -> Any:
    """Returns a connection class whose sockets are `_BoundedSocket`."""

    class BoundedConnection(base):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _BoundedSocket(super()._connect(), seconds, most_bytes)

    return BoundedConnection
