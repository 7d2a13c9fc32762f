"""Keys made for a test, and policies that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.storage.private_key import SigningKey, make_key
from nvgemm_aot.storage.signed_files import sign_file
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.installed.signatures import bundle_subject, file_subject

CRYPTOGRAPHY = pytest.importorskip("cryptography")


def new_key(directory: Path, name: str) -> SigningKey:
    """Make a key in a new file."""
    return make_key(directory / f"{name}.pem")


def policy_text(
    keys: dict[str, SigningKey],
    *,
    until: dict[str, str] | None = None,
    revoked: tuple[SigningKey, ...] = (),
    required: bool | None = None,
) -> str:
    """A policy with these keys by name."""
    lines = ["keys:"] if keys else ["keys: []"]
    for name, key in keys.items():
        lines += [f"  - name: {name}", f"    ed25519: {key.public_text}"]
        lines += [f"    until: {until[name]}"] if until and name in until else []
    lines += ["revoked:", *(f"  - {key.public_text}" for key in revoked)] if revoked else []
    lines += [] if required is None else [f"required: {str(required).lower()}"]
    return "\n".join([*lines, ""])


def set_policy(
    monkeypatch: pytest.MonkeyPatch, path: Path, keys: dict[str, SigningKey], **how: Any
) -> Path:
    """Write a policy, and make it this process's."""
    path.unlink(missing_ok=True)  # another file, as of a later process
    path.write_text(policy_text(keys, **how))
    monkeypatch.setenv("NVGEMM_AOT_POLICY", str(path))
    return path


def sign_bundle(path: Path, key: SigningKey) -> Path:
    """Sign a bundle, and return its path."""
    with Bundle(path) as bundle:
        sign_file(path, bundle_subject(bundle.prefix), key)
    return path


def sign_content(path: Path, key: SigningKey) -> Path:
    """Sign a file of rankings or confirmations, and return its path."""
    sign_file(path, file_subject(path.read_bytes()), key)
    return path
