"""Rules for a remote cache: entries that are taken, and signatures on this process's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from nvgemm_runtime.errors import SettingError, SignatureError
from nvgemm_runtime.installed.policy import Policy, current_policy
from nvgemm_runtime.installed.signatures import KeySignature, entry_subject
from nvgemm_runtime.settings import (
    POLICY_VARIABLE,
    REMOTE_CACHE_MODE_VARIABLE,
    REMOTE_CACHE_TRUST_VARIABLE,
    printable,
    trusts_remote_cache,
)

from ..private_key import SigningKey, environment_key

_log = logging.getLogger(__name__)

_READ, _READ_WRITE = "read", "read-write"


@dataclass(frozen=True, kw_only=True)
class StoreTrust:
    """Rules of this process for a store that anybody may have written.

    Attributes:
        policy: Keys whose signatures count, or None.
        key: Key that signs this process's entries, or None.
        trusts_store: True if the user trusts everyone who can write the store. A policy goes first.
        is_read_only: True if the user asked for no writing.
    """

    policy: Policy | None
    key: SigningKey | None
    trusts_store: bool
    is_read_only: bool

    @property
    def reads(self) -> bool:
        """True if any entry can be taken."""
        return self.policy is not None or self.trusts_store

    @property
    def writes(self) -> bool:
        """True if this process's entries go to the store, where unsigned ones replace signed ones.

        So a process with a policy, which would take no unsigned entry, writes none.
        """
        writes_unsigned = self.trusts_store and self.policy is None
        return not self.is_read_only and (self.key is not None or writes_unsigned)

    def refusal(self, key: str, sha256: str, signatures: Sequence[KeySignature]) -> str | None:
        """Returns the reason not to take an entry, or None."""
        if self.policy is None:
            return None if self.trusts_store else "no policy says whose entries are taken"
        if not signatures:
            return "it has no signature"
        try:
            self.policy.check("the entry", entry_subject(key, sha256), signatures)
        except SignatureError as error:
            return str(error)
        return None

    def sign(self, key: str, sha256: str) -> tuple[KeySignature, ...]:
        """Signs an entry, if this process has a key."""
        return () if self.key is None else (self.key.sign(entry_subject(key, sha256)),)


def current_trust() -> StoreTrust:
    """Returns the rules that the environment sets; warns of a key that its policy refuses.

    Raises:
        SettingError: If the mode is unknown.
        SignatureError: If the policy or the key cannot be used.
        ToolchainError: If the package cryptography is missing.
    """
    mode = os.environ.get(REMOTE_CACHE_MODE_VARIABLE) or _READ_WRITE
    if mode not in (_READ, _READ_WRITE):
        raise SettingError(
            f"{REMOTE_CACHE_MODE_VARIABLE}={printable(mode)}: allowed are {_READ}, {_READ_WRITE}"
        )
    trust = StoreTrust(
        policy=current_policy(),
        key=None if mode == _READ else environment_key(),
        trusts_store=trusts_remote_cache(),
        is_read_only=mode == _READ,
    )
    if not trust.reads:
        _log.warning(
            "the remote cache is not read, because nothing says whose entries to take: set %s to a "
            "policy with the writers' keys, or %s=1 to trust everyone who can write the store",
            *(POLICY_VARIABLE, REMOTE_CACHE_TRUST_VARIABLE),
        )
    if trust.policy is not None and trust.key is not None:
        probe = "0" * 64
        refusal = trust.refusal(probe, probe, trust.sign(probe, probe))
        if refusal is not None:
            _log.warning("this process cannot use the entries that its own key signs: %s", refusal)
    return trust
