"""Policy: the keys whose signatures count, until when, and what must be signed.

A YAML file that ``$NVGEMM_AOT_POLICY`` names. Everything is checked offline.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import SignatureError, install_command
from ..settings import POLICY_VARIABLE
from .ownership import writable_by_others
from .signatures import Signature, Subject

_KEY_BYTES = 32
_MAX_POLICY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PolicyKey:
    """A public key that counts.

    Attributes:
        name: Name in messages.
        raw: The ed25519 public key, 32 bytes.
        until: Last day, in UTC, on which its signatures count; None for no end.
    """

    name: str
    raw: bytes
    until: datetime.date | None

    @property
    def id(self) -> str:
        """sha256 of the raw key, in hex."""
        return key_id(self.raw)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Keys whose signatures count.

    Attributes:
        path: The file.
        keys: Keys, by id.
        revoked: Ids of keys whose signatures never count.
        is_required: True if what is unsigned is refused; false if only wrong signatures are.
    """

    path: Path
    keys: dict[str, PolicyKey]
    revoked: frozenset[str]
    is_required: bool

    def check(
        self,
        what: str,
        subject: Subject,
        signatures: Sequence[Signature],
        *,
        today: datetime.date | None = None,
    ) -> str | None:
        """Requires that a key of this policy signed ``subject``.

        Args:
            what: File or entry, for messages.
            subject: What was signed.
            signatures: Its signatures; one that counts is enough.
            today: Day in UTC; by default this machine's.

        Returns:
            The name of the key, or None if it is unsigned and need not be signed.

        Raises:
            SignatureError: If no signature counts, with the reason for each.
        """
        if not signatures and not self.is_required:
            return None
        reasons = []
        for signature in signatures:
            reason = self._refusal(subject, signature, today or _today())
            if reason is None:
                return self.keys[signature.key_id].name
            reasons.append(reason)
        observed = "; ".join(reasons) or "it has no signature"
        raise SignatureError(
            f"{what}: no key of the policy {self.path} signed it: {observed}; sign it with one of "
            f"{', '.join(key.name for key in self.keys.values()) or 'its keys (it has none)'}: "
            "nvgemm-aot sign"
        )

    def _refusal(self, subject: Subject, signature: Signature, today: datetime.date) -> str | None:
        short = signature.key_id[:12]
        if signature.key_id in self.revoked:
            return f"key {short} is revoked"
        key = self.keys.get(signature.key_id)
        if key is None:
            return f"key {short} is not in the policy"
        if key.until is not None and today > key.until:
            return f"key {key.name} counted until {key.until}, today is {today}"
        if not _is_right(key.raw, signature.value, subject.message):
            return f"the signature of key {key.name} is for another content"
        return None


def key_id(raw: bytes) -> str:
    """Returns the id of a raw public key."""
    return hashlib.sha256(raw).hexdigest()


def current_policy() -> Policy | None:
    """Returns the policy that the environment names, or None.

    Raises:
        SignatureError: If it cannot be used.
    """
    name = os.environ.get(POLICY_VARIABLE)
    return _read_once(Path(os.path.abspath(name))) if name else None  # noqa: PTH100


def read_policy(path: Path) -> Policy:
    """Reads a policy.

    Raises:
        SignatureError: If others could change it, or it breaks a rule, with the place.
    """
    import yaml

    try:
        refusal = writable_by_others(path.absolute())
        data = path.read_bytes() if refusal is None else b""
    except OSError as error:
        raise SignatureError(f"policy {path}: cannot read: {error.strerror}") from None
    if refusal is not None:
        raise SignatureError(
            f"policy {path} decides which code runs, and others control it: {refusal}"
        )
    if len(data) > _MAX_POLICY_BYTES:
        raise SignatureError(f"policy {path}: {len(data)} bytes, at most {_MAX_POLICY_BYTES}")
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SignatureError(f"policy {path}: not YAML: {' '.join(str(error).split())}") from None
    return _Reader(path).policy(document)


def public_text(raw: bytes) -> str:
    """Returns a raw public key as policies name it."""
    return base64.b64encode(raw).decode()


class _Reader:
    """Reads a policy's document. Each error names the member, what it is and what is allowed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def policy(self, document: Any) -> Policy:
        fields = self._fields(document, "the policy", {"keys"}, {"revoked", "required"})
        keys = [
            self._key(entry, f"keys[{index}]")
            for index, entry in enumerate(self._list(fields["keys"], "keys"))
        ]
        for attribute in ("name", "id"):
            values = [getattr(key, attribute) for key in keys]
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                self._fail("keys", f"{attribute} {twice!r} twice", "each key once")
        revoked = [
            key_id(self._raw(text, f"revoked[{index}]"))
            for index, text in enumerate(self._list(fields.get("revoked", []), "revoked"))
        ]
        is_required = fields.get("required", True)
        if not isinstance(is_required, bool):
            self._fail("required", repr(is_required), "true or false")
        return Policy(
            path=self._path,
            keys={key.id: key for key in keys},
            revoked=frozenset(revoked),
            is_required=is_required,
        )

    def _key(self, value: Any, where: str) -> PolicyKey:
        fields = self._fields(value, where, {"name", "ed25519"}, {"until"})
        name, until = fields["name"], fields.get("until")
        if not (isinstance(name, str) and name.isprintable() and 1 <= len(name) <= 80):
            self._fail(f"{where}.name", repr(name), "1 to 80 printable characters")
        if until is not None and type(until) is not datetime.date:
            self._fail(f"{where}.until", repr(until), "a day, such as 2027-06-30")
        return PolicyKey(
            name=name, raw=self._raw(fields["ed25519"], f"{where}.ed25519"), until=until
        )

    def _raw(self, text: Any, where: str) -> bytes:
        try:
            raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        except (ValueError, binascii.Error):
            raw = b""
        if len(raw) != _KEY_BYTES:
            self._fail(
                where, repr(text), "a public key of 32 bytes in base64, as nvgemm-aot keygen prints"
            )
        return raw

    def _fields(
        self, value: Any, where: str, needed: set[str], optional: set[str]
    ) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(where, repr(value), f"members {', '.join(sorted(needed | optional))}")
        for name in needed - value.keys():
            self._fail(where, f"no {name}", "every member that is not optional")
        for name in value.keys() - needed - optional:
            self._fail(where, f"{name!r}", f"members {', '.join(sorted(needed | optional))}")
        return value

    def _list(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self._fail(where, repr(value), "a list")
        return value

    def _fail(self, where: str, observed: str, allowed: str) -> NoReturn:
        raise SignatureError(f"policy {self._path}: {where}: {observed:.200}; allowed: {allowed}")


@functools.lru_cache(maxsize=1)
def _read_once(path: Path) -> Policy:
    return read_policy(path)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def _is_right(raw: bytes, signature: bytes, message: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise SignatureError(
            f"signatures cannot be checked: {error}; {install_command('fleet')}"
        ) from None
    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except InvalidSignature:
        return False
    return True
