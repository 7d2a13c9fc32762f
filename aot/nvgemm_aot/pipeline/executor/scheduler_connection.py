"""Addresses of Dask schedulers, and connections to them."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from nvgemm_runtime.errors import ExecutorError, ToolchainError, install_command, one_line
from nvgemm_runtime.settings import printable

LOCAL = "local"
"""The executor that needs no scheduler: processes of this machine."""

INSECURE_OPTION = "--insecure-executor"

CONNECT_SECONDS = 10.0
"""Longest time to reach a scheduler, in seconds."""

ANSWER_SECONDS = 30.0
"""Longest time for a scheduler to answer a question, in seconds."""

_CLOSE_SECONDS = 2.0

_TLS_VARIABLES = (
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT and "
    "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"
)


def check_address(address: str, *, allow_insecure: bool = False) -> str:
    """Returns a scheduler's address if it may be used.

    Whoever reaches a scheduler without TLS runs code on its workers, and the scheduler runs code in
    its clients. So ``tcp://`` is allowed on this machine alone, unless ``allow_insecure``.

    Raises:
        ValueError: If it may not, with the reason.
    """
    scheme, host, port = _parts(address)
    if scheme not in ("tls", "tcp"):
        raise ValueError(
            f"{printable(f'{scheme}://')} is no protocol for an executor; allowed are tls:// and, "
            "on this machine, tcp://"
        )
    if scheme == "tcp" and not allow_insecure and not _is_loopback(host):
        raise ValueError(
            f"{printable(address)} is a scheduler without TLS on another machine: whoever reaches "
            "it can run code here and on its workers; use tls://, or allow it with "
            f"{INSECURE_OPTION}"
        )
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _parts(address: str) -> tuple[str, str, int]:
    """Returns an address's scheme, host and port."""
    form = "a scheduler's address is such as tls://scheduler:8786"
    if "@" in address:  # what stands before it may be a password, so it is not repeated
        raise ValueError(f"a name or a password in the address is not allowed; {form}")
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{printable(address)}: {one_line(str(error))}; {form}") from None
    if not url.scheme or not host or not port or url.path or url.query or url.fragment:
        raise ValueError(f"{printable(address)} is neither {LOCAL} nor an address; {form}")
    if ":" not in host and not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ValueError(f"{printable(host)} is no host name; {form}")
    return url.scheme, host, port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def connect(address: str, *, allow_insecure: bool = False) -> Iterator[Any]:
    """Yields a ``distributed.Client`` of a scheduler, and closes it.

    Certificates come from Dask's own configuration. With ``tls://``, the client refuses any
    connection without TLS.

    Raises:
        ValueError: If the address is not allowed; see `check_address`.
        ExecutorError: If the scheduler cannot be reached within `CONNECT_SECONDS`.
        ToolchainError: If distributed is not installed.
    """
    checked = check_address(address, allow_insecure=allow_insecure)
    import asyncio

    try:
        import distributed
        from distributed.security import Security
    except ImportError as error:
        raise ToolchainError(
            f"executor {checked} needs distributed: {one_line(str(error))}; "
            f"{install_command('fleet')}"
        ) from None
    _silence(distributed)
    security = Security(require_encryption=True) if checked.startswith("tls:") else Security()
    try:
        # A client would wait without end for a server that accepts and does not answer.
        asyncio.run(_greet(checked, security.get_connection_args("client")))
        client = distributed.Client(
            checked,
            timeout=CONNECT_SECONDS,
            set_as_default=False,
            direct_to_workers=False,
            security=security,
        )
    # Besides OSError: missing certificates, servers of another kind, and other releases of Dask.
    except Exception as error:
        raise ExecutorError(_unreachable_text(checked, error)) from None
    try:
        yield client
    finally:
        # A scheduler that is gone must not keep this process.
        with contextlib.suppress(Exception):
            client.close(timeout=_CLOSE_SECONDS)


def workers_of(client: Any, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Asks a scheduler for all its workers, and returns their descriptions by address.

    ``Client.scheduler_info`` would leave out some of them, or all, in some releases of Dask.

    Raises:
        OSError: If the scheduler cannot be reached.
        TimeoutError: If it does not answer within ``seconds``.
    """
    import asyncio

    identity = client.scheduler.identity
    try:
        answer: dict[str, Any] = client.sync(identity, n_workers=-1, callback_timeout=seconds)
    except asyncio.TimeoutError:  # a class of its own in Python 3.10
        raise TimeoutError(f"the scheduler does not answer, for {seconds:g} s") from None
    workers: dict[str, Any] = answer["workers"]
    return workers


async def _greet(address: str, arguments: dict[str, Any]) -> None:
    """Connects to a scheduler and exchanges greetings, within `CONNECT_SECONDS`."""
    import asyncio

    from distributed.comm import connect

    connecting = connect(address, timeout=CONNECT_SECONDS, **arguments)
    comm = await asyncio.wait_for(connecting, CONNECT_SECONDS + 1)
    await comm.close()


def _silence(distributed: Any) -> None:
    """Keeps Dask's own logs off the terminal: errors that matter are raised or reported here."""
    for name in ("distributed", "distributed.client", "distributed.comm", "distributed.core"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # A worker of another release is refused with the reason; see `fleet_worker.check_worker`.
    warnings.filterwarnings(
        "ignore", category=distributed.versions.VersionMismatchWarning, module="distributed"
    )


def _unreachable_text(address: str, error: BaseException) -> str:
    """Returns the message for a connection that failed, with the next step for its cause."""
    import asyncio
    import ssl

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = one_line(str(causes[-1] if isinstance(causes[-1], ssl.SSLError) else error))
    if isinstance(error, asyncio.TimeoutError):
        text = f"it accepts connections and does not answer within {CONNECT_SECONDS:g} s"
    if isinstance(error, TypeError) and "ssl_context" in str(error):
        text, step = "no certificates are configured", f"set {_TLS_VARIABLES}"
    elif isinstance(error, (FileNotFoundError, PermissionError)):
        text, step = f"a certificate's file cannot be read: {text}", f"check {_TLS_VARIABLES}"
    elif any(isinstance(cause, ssl.SSLError) for cause in causes):
        step = f"check {_TLS_VARIABLES} against the scheduler's certificates"
    else:
        step = "is it running (dask scheduler), with the protocol, host and port of the address?"
    return f"executor {address} cannot be reached: {printable(text, 300)}; {step}"
