"""Which remote entries are taken: only those that a key of the policy signed for their own key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvgemm_aot.storage.private_key import SigningKey, make_key
from nvgemm_aot.storage.remote.store_trust import StoreTrust, current_trust
from nvgemm_runtime import settings
from nvgemm_runtime.errors import SettingError, SignatureError
from nvgemm_runtime.installed.policy import read_policy
from nvgemm_runtime.installed.signatures import public_text

ENTRY, OTHER = "a" * 64, "b" * 64
DIGEST = hashlib.sha256(b"payload").hexdigest()


@dataclass
class Keys:
    ours: SigningKey
    foreign: SigningKey
    policy: Path
    private: Path


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    ours, foreign = make_key(tmp_path / "ours.pem"), make_key(tmp_path / "foreign.pem")
    path = tmp_path / "policy.yaml"
    path.write_text(f"keys: [{{name: ci, ed25519: {public_text(ours.public)}}}]\nrequired: false\n")
    return Keys(ours, foreign, path, tmp_path / "ours.pem")


def reader(keys: Keys) -> StoreTrust:
    return StoreTrust(
        policy=read_policy(keys.policy), key=None, trusts_store=False, is_read_only=True
    )


def signed(key: SigningKey) -> StoreTrust:
    return StoreTrust(policy=None, key=key, trusts_store=False, is_read_only=False)


def test_takes_an_entry_that_a_key_of_the_policy_signed(keys: Keys) -> None:
    signatures = signed(keys.foreign).sign(ENTRY, DIGEST) + signed(keys.ours).sign(ENTRY, DIGEST)
    assert reader(keys).refusal(ENTRY, DIGEST, signatures) is None


def test_refuses_an_unsigned_entry_even_where_bundles_need_no_signature(keys: Keys) -> None:
    assert reader(keys).refusal(ENTRY, DIGEST, ()) == "it has no signature"


def test_refuses_a_foreign_key(keys: Keys) -> None:
    refusal = reader(keys).refusal(ENTRY, DIGEST, signed(keys.foreign).sign(ENTRY, DIGEST))
    assert refusal is not None
    assert "is not in the policy" in refusal


@pytest.mark.parametrize(
    ("key", "digest"), [(OTHER, DIGEST), (ENTRY, "0" * 64)], ids=["other key", "other payload"]
)
def test_refuses_a_signature_for_another_entry(keys: Keys, key: str, digest: str) -> None:
    refusal = reader(keys).refusal(ENTRY, DIGEST, signed(keys.ours).sign(key, digest))
    assert refusal is not None
    assert "the signature of key ci is for another content" in refusal


def test_a_policy_goes_before_trust_in_the_store(keys: Keys) -> None:
    trust = StoreTrust(
        policy=read_policy(keys.policy), key=None, trusts_store=True, is_read_only=False
    )
    assert trust.refusal(ENTRY, DIGEST, ()) == "it has no signature"


@pytest.mark.parametrize(
    ("variables", "reads", "writes"),
    [
        ("", False, False),
        ("policy", True, False),
        ("key", False, True),
        ("policy key", True, True),
        ("policy key read", True, False),
        ("trust", True, True),
        ("policy trust", True, False),
        ("policy trust key", True, True),
        ("trust read", True, False),
    ],
)
def test_variables_decide_what_is_read_and_written(
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: str,
    reads: bool,
    writes: bool,
) -> None:
    settings._warn_once.cache_clear()
    values = {
        "policy": ("NVGEMM_AOT_POLICY", str(keys.policy)),
        "key": ("NVGEMM_AOT_SIGNING_KEY", str(keys.private)),
        "trust": ("NVGEMM_AOT_REMOTE_CACHE_TRUST", "1"),
        "read": ("NVGEMM_AOT_REMOTE_CACHE_MODE", "read"),
    }
    for name, (variable, value) in values.items():
        if name in variables.split():
            monkeypatch.setenv(variable, value)
        else:
            monkeypatch.delenv(variable, raising=False)
    trust = current_trust()
    assert (trust.reads, trust.writes) == (reads, writes)
    assert len(caplog.messages) == (not reads)
    assert all("NVGEMM_AOT_POLICY" in message for message in caplog.messages)


def test_a_misspelt_mode_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_REMOTE_CACHE_MODE", "raed")
    with pytest.raises(SettingError, match="MODE=raed: allowed are read, read-write"):
        current_trust()


def test_a_missing_policy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGEMM_AOT_POLICY", "/nonexistent/policy.yaml")
    with pytest.raises(SignatureError, match="cannot read"):
        current_trust()


def test_warns_of_a_key_that_its_own_policy_refuses(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_POLICY", str(keys.policy))
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", str(tmp_path / "foreign.pem"))
    assert current_trust().writes
    (message,) = caplog.messages
    assert "this process cannot use the entries that its own key signs" in message
    assert "is not in the policy" in message


def test_an_ended_key_names_both_days(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"keys: [{{name: ci, ed25519: {public_text(keys.ours.public)}, until: 2001-02-03}}]\n"
    keys.policy.write_text(line)
    refusal = reader(keys).refusal(ENTRY, DIGEST, signed(keys.ours).sign(ENTRY, DIGEST))
    assert refusal is not None
    assert "key ci counted until 2001-02-03, today is 20" in refusal
