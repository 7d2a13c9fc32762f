"""Policy: the keys whose signatures count, until when, and if what is unsigned is refused.

A YAML file that ``$NVGEMM_AOT_POLICY`` names. Everything is checked offline.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import SignatureError, StorageError
from ..settings import POLICY_VARIABLE, printable, printable_path
from .ownership import writable_by_others
from .regular_files import read_regular
from .signatures import KEY_BYTES, KeySignature, Subject, key_id

_MAX_POLICY_BYTES = 64 << 10
_MAX_NAME_CHARACTERS = 80
_MOST_FAULTS = 5
"""Most signatures whose faults a message lists."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_MEMBER = re.compile(r"[a-z_]{1,20}")


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
        """The raw key in hex."""
        return key_id(self.raw)

    def days_left(self, day: datetime.date) -> int | None:
        """Returns the days after ``day`` on which it counts, negative after its end; or None."""
        return None if self.until is None else (self.until - day).days


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A policy's verdict on a signature.

    Attributes:
        public: The key that made it, as `signatures.public_text` writes it.
        name: The key's name in the policy, or None.
        fault: Reason that it does not count, or None.
    """

    public: str
    name: str | None
    fault: str | None


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
        signatures: Sequence[KeySignature],
        *,
        today: datetime.date | None = None,
    ) -> str | None:
        """Requires that a key of this policy signed ``subject``.

        Args:
            what: File or entry, for messages.
            subject: The signed subject.
            signatures: Its signatures; one that counts is enough.
            today: Day in UTC; by default this machine's.

        Returns:
            The name of the key, or None if it is unsigned and need not be signed.

        Raises:
            SignatureError: If no signature counts, with the reason for each.
        """
        if not signatures and not self.is_required:
            return None
        day = today or utc_today()
        verdicts = self.judge(subject, signatures, today=day)
        for verdict in verdicts:
            if verdict.fault is None:
                return verdict.name
        faults = [str(one.fault) for one in verdicts[:_MOST_FAULTS]]
        if len(verdicts) > _MOST_FAULTS:
            faults.append(f"{len(verdicts) - _MOST_FAULTS} more signatures do not count either")
        observed = "; ".join(faults) or "it has no signature"
        usable = [
            key.name
            for key in self.keys.values()
            if key.id not in self.revoked and (key.until is None or day <= key.until)
        ]
        raise SignatureError(
            f"{what}: no key that counts in the policy {printable_path(self.path)} signed it: "
            f"{observed}; sign it with "
            + (f"{' or '.join(usable)}: nvgemm-aot sign" if usable else "a key added to the policy")
        )

    def judge(
        self,
        subject: Subject,
        signatures: Sequence[KeySignature],
        *,
        today: datetime.date | None = None,
    ) -> tuple[Verdict, ...]:
        """Judges each signature; see `check`."""
        day = today or utc_today()
        return tuple(self._verdict(subject, signature, day) for signature in signatures)

    def _verdict(self, subject: Subject, signature: KeySignature, today: datetime.date) -> Verdict:
        id_ = signature.key_id
        key, shown = self.keys.get(id_), signature.public_text
        if id_ in self.revoked:
            fault: str | None = f"key {key.name if key else shown} is revoked"
        elif key is None:
            fault = f"key {shown} is not in the policy"
        elif key.until is not None and today > key.until:
            fault = f"key {key.name} counted until {key.until}, today is {today} (UTC)"
        elif not signature.is_for(subject):
            fault = f"the signature of key {key.name} is for another content"
        else:
            fault = None
        return Verdict(public=shown, name=key.name if key else None, fault=fault)


def utc_today() -> datetime.date:
    """Returns this machine's day in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date()


def current_policy() -> Policy | None:
    """Returns the policy that the environment names, or None.

    A process reads it again only if the file was replaced.

    Raises:
        SignatureError: If it cannot be used.
    """
    name = os.environ.get(POLICY_VARIABLE)
    if not name:
        return None
    path = Path(os.path.abspath(name))  # noqa: PTH100
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return _read_once(path, (status.st_dev, status.st_ino, status.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _read_once(path: Path, identity: tuple[int, int, int]) -> Policy:
    del identity  # part of the cache's key
    return read_policy(path)


def read_policy(path: Path) -> Policy:
    """Reads a policy.

    Raises:
        SignatureError: If others could change it, or it breaks a rule, with the place. No message
            repeats what stands where keys belong: it may be a private key.
    """
    name = printable_path(path)
    try:
        refusal = writable_by_others(path.absolute())
        data = read_regular(path, _MAX_POLICY_BYTES + 1) if refusal is None else b""
    except (OSError, StorageError) as error:
        raise _unreadable(path, error) from None
    if refusal is not None:
        raise SignatureError(
            f"policy {name} decides which code runs, and others control it: {refusal}"
        )
    if len(data) > _MAX_POLICY_BYTES:
        raise SignatureError(f"policy {name}: more than {_MAX_POLICY_BYTES} bytes, the most read")
    return _Reader(name).policy(_parse(name, data), path)


def _unreadable(path: Path, error: Exception) -> SignatureError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return SignatureError(
        f"policy {printable_path(path)}: cannot read: {reason}; correct {POLICY_VARIABLE}"
    )


def _parse(name: str, data: bytes) -> Any:
    """Parses YAML without aliases, duplicate keys or types: each scalar stays a text.

    So no value takes more memory than its text, and a key or a day is never read as a number.
    """
    import yaml

    class Loader(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(
                    problem="aliases are not allowed",
                    problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem="a member's name must be a text, and stand once",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(data, Loader)
    except yaml.MarkedYAMLError as error:
        # Without the lines that the error quotes.
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise SignatureError(f"policy {name}: {where}{error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise SignatureError(f"policy {name}: not YAML: {type(error).__name__}") from None


class _Reader:
    """Reads a policy's document. Each error names the member, what it is and what is allowed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def policy(self, document: Any, path: Path) -> Policy:
        fields = self._fields(document, "the policy", {"keys"}, {"revoked", "required"})
        keys = [
            self._key(entry, f"keys[{index}]")
            for index, entry in enumerate(self._list(fields["keys"], "keys"))
        ]
        for index, key in enumerate(keys):
            for before, other in enumerate(keys[:index]):
                if key.name == other.name:
                    self._fail(f"keys[{index}].name", f"that of keys[{before}]", "each once")
                if key.raw == other.raw:
                    self._fail(f"keys[{index}].ed25519", f"that of keys[{before}]", "each once")
        revoked = [
            key_id(self._raw(text, f"revoked[{index}]"))
            for index, text in enumerate(self._list(fields.get("revoked", []), "revoked"))
        ]
        required = fields.get("required", "true")
        if required not in ("true", "false"):
            self._fail("required", _shown(required), "true or false")
        return Policy(
            path=path,
            keys={key.id: key for key in keys},
            revoked=frozenset(revoked),
            is_required=required == "true",
        )

    def _key(self, value: Any, where: str) -> PolicyKey:
        fields = self._fields(value, where, {"name", "ed25519"}, {"until"})
        name = fields["name"]
        if not (
            isinstance(name, str) and name.isprintable() and 1 <= len(name) <= _MAX_NAME_CHARACTERS
        ):
            allowed = f"1 to {_MAX_NAME_CHARACTERS} printable characters"
            self._fail(f"{where}.name", _described(name), allowed)
        raw = self._raw(fields["ed25519"], f"{where}.ed25519")
        until = self._day(fields["until"], f"{where}.until") if "until" in fields else None
        return PolicyKey(name=name, raw=raw, until=until)

    def _day(self, value: Any, where: str) -> datetime.date:
        try:
            if isinstance(value, str) and _DAY.fullmatch(value):
                return datetime.date.fromisoformat(value)
        except ValueError:
            pass
        self._fail(where, _shown(value), "a day, such as 2027-06-30")

    def _raw(self, text: Any, where: str) -> bytes:
        try:
            raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        except (ValueError, binascii.Error):
            raw = b""
        allowed = f"a public key, {KEY_BYTES} bytes in base64, as nvgemm-aot keygen prints it"
        if len(raw) != KEY_BYTES:
            observed = f"{len(raw)} bytes in base64" if raw else _described(text)
            self._fail(where, observed, allowed)
        if not _is_strong_point(raw):
            self._fail(where, "32 bytes that are no ed25519 public key", allowed)
        return raw

    def _fields(
        self, value: Any, where: str, needed: set[str], optional: set[str]
    ) -> dict[str, Any]:
        allowed = f"{', '.join(sorted(needed))}, and optionally {', '.join(sorted(optional))}"
        if not isinstance(value, dict):
            self._fail(where, _described(value), allowed)
        for name in sorted(needed - value.keys()):
            self._fail(where, f"no {name}", allowed)
        if unknown := [name for name in value if name not in needed | optional]:
            shown = unknown[0] if _MEMBER.fullmatch(unknown[0]) else "with another text as its name"
            self._fail(where, f"the unknown member {shown}", allowed)
        return value

    def _list(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self._fail(where, _described(value), "a list")
        return value

    def _fail(self, where: str, observed: str, allowed: str) -> NoReturn:
        raise SignatureError(f"policy {self._name}: {where}: {observed}; allowed: {allowed}")


def _shown(value: Any) -> str:
    """Returns a text that is no key, or describes another value."""
    return printable(repr(value)) if value and isinstance(value, str) else _described(value)


def _described(value: Any) -> str:
    """Describes a value without repeating it."""
    if value in (None, ""):
        return "nothing"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    return "a list" if isinstance(value, list) else "an object"


_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_WEAK_Y8 = int("7a03ac9277fdc74ec6cc392cfa53202a0f67100d760b3cba4fd84d3d706a17c7", 16)
_WEAK_Y = (0, 1, _P - 1, _WEAK_Y8, _P - _WEAK_Y8)
"""The y coordinates of the eight points whose order divides 8. Anyone can sign for them."""


def _is_strong_point(raw: bytes) -> bool:
    """Returns True if a raw public key is a point of the curve that only a private key signs for.

    RFC 8032, 5.1.3: y in 255 bits, below p, and x² = (y² - 1) / (d y² + 1) has a root.
    """
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    if y >= _P or y in _WEAK_Y:
        return False
    x_squared = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    return pow(x_squared, (_P - 1) // 2, _P) == 1
