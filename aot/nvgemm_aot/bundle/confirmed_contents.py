"""Reads files with confirmations that a wheel takes beside its bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.confirmations import (
    MAX_BYTES,
    Confirmations,
    decode_confirmations,
    encode_confirmations,
)
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.errors import PackagingError, StorageError
from nvgemm_runtime.installed.confirmed_files import confirmed_name
from nvgemm_runtime.installed.signatures import file_subject

from ..storage.files import open_regular
from .packed_signatures import packed_signatures


@dataclass(frozen=True, kw_only=True)
class ConfirmedContent:
    """File with confirmations on its way into wheels.

    Attributes:
        data: The file's bytes.
        kernels: Ids of the kernels that it confirms.
        signatures: Its signature file, or None.
    """

    data: bytes
    kernels: frozenset[str]
    signatures: bytes | None

    def confirms(self, headers: Sequence[Header]) -> bool:
        """Returns True if it confirms a kernel of bundles."""
        return any(kernel.id in self.kernels for header in headers for kernel in header.kernels)


def confirmed_contents(
    paths: Sequence[Path], headers: Sequence[Header]
) -> dict[str, ConfirmedContent]:
    """Returns files with confirmations, by name inside a wheel's package, sorted.

    Raises:
        PackagingError: If a file confirms no kernel of the bundles, or two files are for the same
            GPU product, minor torch version and CUDA version.
        SignatureError: If a signature is for other content, or the policy refuses a file.
        RankingsError: If a file breaks a rule of its format.
        StorageError: If a file cannot be read.
    """
    ids = {kernel.id for header in headers for kernel in header.kernels}
    contents: dict[str, ConfirmedContent] = {}
    for path in paths:
        confirmations = read_confirmations(path)
        confirmed_ids = {id_ for times in confirmations.problems.values() for id_ in times.kernels}
        if confirmed_ids.isdisjoint(ids):
            raise PackagingError(
                f"{path} confirms none of the bundles' {len(ids)} kernels (it confirms "
                f"{len(confirmed_ids)} others); run nvgemm-aot confirm where these bundles are "
                "installed"
            )
        conditions = confirmations.conditions
        name = confirmed_name(confirmations.gpu, conditions.torch, conditions.cuda)
        if name in contents:
            raise PackagingError(
                f"{path} is the second file for {confirmations.gpu}, torch {conditions.torch} and "
                f"CUDA {conditions.cuda}, at most 1 is allowed; leave one out"
            )
        data = encode_confirmations(confirmations)
        contents[name] = ConfirmedContent(
            data=data,
            kernels=frozenset(confirmed_ids),
            signatures=packed_signatures(path, file_subject(data)),
        )
    return dict(sorted(contents.items()))


def read_confirmations(path: Path) -> Confirmations:
    """Reads a file with confirmations.

    Raises:
        RankingsError: If it breaks a rule of its format.
        StorageError: If it cannot be read.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
    return decode_confirmations(data, str(path))
