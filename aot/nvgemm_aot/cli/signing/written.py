"""Signs finished files: those that commands write for others, and those named to ``sign``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from nvgemm_runtime.bundle.confirmations import FORMAT_NAME as CONFIRMATIONS
from nvgemm_runtime.bundle.confirmations import decode_confirmations
from nvgemm_runtime.bundle.format import MAGIC
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import SignatureError, StorageError, count_text
from nvgemm_runtime.installed.policy import current_policy
from nvgemm_runtime.installed.signatures import (
    SIGNATURE_SUFFIX,
    Subject,
    bundle_subject,
    file_subject,
    signature_path,
)

from ...rankings.file import FORMAT as RANKINGS
from ...rankings.file import MOST_BYTES, decode
from ...storage.files import open_regular
from ...storage.private_key import SigningKey, environment_key
from ...storage.signed_files import sign_file
from .signed_by import signatures_document

Document = dict[str, Any]


def sign_files(paths: Sequence[Path], key: SigningKey) -> list[Document]:
    """Signs files beside them; signs none unless all are intact.

    Returns:
        For each file, ``path``, ``signature_file`` and the members of `signatures_document`.

    Raises:
        SignatureError: If a file is none that is signed.
        StorageError: If a file cannot be read or written.
        BundleFormatError, RankingsError: If a file is damaged.
    """
    subjects = [_checked_subject(path) for path in paths]
    documents = []
    for path, subject in zip(paths, subjects):
        sign_file(path, subject, key)
        documents.append(
            {
                "path": str(path),
                "signature_file": str(signature_path(path)),
                **signatures_document(path, subject),
            }
        )
    return documents


def output_key() -> SigningKey | None:
    """Returns the key that signs a command's output, before the command does its work.

    Raises:
        SignatureError: If the environment's key or policy cannot be used.
        ToolchainError: If there is a key, and the package cryptography is missing.
    """
    current_policy()
    return environment_key()


def sign_written(paths: Iterable[Path], key: SigningKey | None) -> None:
    """Signs the files that a command has written, if there is a key.

    Warns on standard error of those that this machine's policy refuses nevertheless.
    """
    written = list(paths)
    if key is not None:
        documents = sign_files(written, key)
        count = count_text(len(written), "file")
        click.echo(f"nvgemm-aot: {count} signed with key {key.public_text}", err=True)
    elif current_policy() is not None:
        documents = [
            signatures_document(path, subject)
            for path, subject in zip(written, map(_checked_subject, written))
        ]
    else:
        return
    for document in documents:
        if document["refusal"] is not None:
            click.echo(f"nvgemm-aot: {document['refusal']}", err=True)


def _checked_subject(path: Path) -> Subject:
    """Returns an intact file's subject."""
    if path.suffix == ".whl":
        raise SignatureError(
            f"{path}: a wheel is not signed; sign its bundles, then pack them: nvgemm-aot wheel"
        )
    try:
        with open_regular(path) as file:
            data = file.read(len(MAGIC))
            if data != MAGIC:
                data += file.read(MOST_BYTES + 1 - len(data))
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
    if data == MAGIC:
        with Bundle(path) as bundle:
            bundle.check_body()
            return bundle_subject(bundle.prefix)
    kind = _json_format(data)
    if kind == RANKINGS:
        decode(str(path), data)
    elif kind == CONFIRMATIONS:
        decode_confirmations(data, str(path))
    else:
        raise SignatureError(
            f"{path}: only bundles, rankings files and confirmations are signed"
            + ("; this is a signature" if path.suffix == SIGNATURE_SUFFIX else "")
        )
    return file_subject(data)


def _json_format(data: bytes) -> object:
    """Returns the member ``format`` of a JSON document, or None."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document.get("format") if isinstance(document, dict) else None
