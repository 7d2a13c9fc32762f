"""A Dask scheduler and workers, each a process of its own on loopback."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason="builds over Dask need distributed, of the extra fleet")

SUPPORT = Path(__file__).parent

_TLS = "DASK_DISTRIBUTED__COMM__TLS__"
_CA_VARIABLE = f"{_TLS}CA_FILE"


class Fleet:
    """A scheduler and the workers that a test starts at it; with TLS if `name_certificates` ran."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        protocol = "tls" if _CA_VARIABLE in os.environ else "tcp"
        self.directory = directory
        self._environment = {**os.environ, **(environment or {})}
        self._processes: list[subprocess.Popen[str]] = []
        self.workers: list[subprocess.Popen[str]] = []
        self.scheduler = self._start(
            *("scheduler", "dask_scheduler", "--port", "0", "--host", "127.0.0.1"),
            *("--protocol", protocol),
        )
        self.address = self._wait_for("scheduler", r"Scheduler at: +(t[lc][sp]://[0-9.:]+)")

    def worker(
        self, name: str, *, threads: int = 1, preload: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[str]:
        """Starts a worker with a cache directory of its own; returns once it is registered."""
        environment = {"NVGEMM_AOT_CACHE": str(self.directory / name)} | environment
        process = self._start(
            name,
            "dask_worker",
            self.address,
            *("--no-nanny", "--nthreads", str(threads)),
            *("--local-directory", str(self.directory / f"{name}.scratch")),
            *(argument for module in preload for argument in ("--preload", module)),
            environment=environment,
        )
        self._wait_for(name, r"Registered to: +(t[lc][sp]://[0-9.:]+)")
        self.workers.append(process)
        return process

    def output(self, name: str) -> str:
        """What a process has printed."""
        return (self.directory / f"{name}.log").read_text()

    def stop(self) -> None:
        """Ends every process."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self._processes:
            process.wait()

    def _start(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        self.directory.mkdir(exist_ok=True)
        with (self.directory / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *arguments],
                stdout=log,
                stderr=log,
                text=True,
                env={**self._environment, "PYTHONPATH": str(SUPPORT), **(environment or {})},
            )
        self._processes.append(process)
        return process

    def _wait_for(self, name: str, pattern: str) -> str:
        process = self._processes[-1]
        while process.poll() is None:
            match = re.search(pattern, self.output(name))
            if match is not None:
                return match[1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
        raise AssertionError(f"{name} ended: {self.output(name)}")


def name_certificates(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Makes a certificate that signs itself, and names it for every part of Dask."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir()
    (directory / "fleet.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (directory / "fleet.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    patch.setenv(_CA_VARIABLE, str(directory / "fleet.pem"))
    for part in ("SCHEDULER", "WORKER", "CLIENT"):
        patch.setenv(f"{_TLS}{part}__CERT", str(directory / "fleet.pem"))
        patch.setenv(f"{_TLS}{part}__KEY", str(directory / "fleet.key"))


@contextlib.contextmanager
def fleet(directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[Fleet]:
    """Yields a scheduler without workers; ends all its processes."""
    started = Fleet(directory, environment)
    try:
        yield started
    finally:
        started.stop()
