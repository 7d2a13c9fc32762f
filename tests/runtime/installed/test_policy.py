"""Policies: what they accept, and how each mistake in one is named."""

from __future__ import annotations

import base64
import datetime
import os
import sys
from pathlib import Path

import pytest

from nvgemm_aot.storage.private_key import SigningKey
from nvgemm_runtime.errors import SignatureError
from nvgemm_runtime.installed import policy as policy_module
from nvgemm_runtime.installed.policy import Policy, current_policy, read_policy
from nvgemm_runtime.installed.signatures import (
    KeySignature,
    bundle_subject,
    entry_subject,
    file_subject,
)
from signing_keys import new_key, policy_text, set_policy

SUBJECT = bundle_subject(b"a bundle")
DAY = datetime.date(2026, 11, 28)


@pytest.fixture
def ci(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path, "ci")


@pytest.fixture
def other(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path, "other")


def read(tmp_path: Path, text: str | bytes) -> Policy:
    path = tmp_path / "policy.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_policy(path)


def reason(policy: Policy, *signatures: KeySignature, today: datetime.date = DAY) -> str:
    with pytest.raises(SignatureError) as refused:
        policy.check("a.nvgemm", SUBJECT, signatures, today=today)
    return str(refused.value)


def test_names_the_key_that_signed(tmp_path: Path, ci: SigningKey, other: SigningKey) -> None:
    policy = read(tmp_path, policy_text({"ci": ci, "other": other}))
    assert policy.check("a", SUBJECT, [ci.sign(SUBJECT)]) == "ci"
    assert policy.check("a", SUBJECT, [other.sign(SUBJECT)]) == "other"


def test_one_signature_that_counts_is_enough(
    tmp_path: Path, ci: SigningKey, other: SigningKey
) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}, revoked=(other,)))
    signatures = [other.sign(SUBJECT), ci.sign(file_subject(b"")), ci.sign(SUBJECT)]
    assert policy.check("a", SUBJECT, signatures) == "ci"


def test_refuses_what_is_unsigned(tmp_path: Path, ci: SigningKey) -> None:
    text = reason(read(tmp_path, policy_text({"ci": ci})))
    assert "a.nvgemm: no key that counts in the policy" in text
    assert text.endswith("it has no signature; sign it with ci: nvgemm-aot sign")


def test_refuses_unknown_and_revoked_keys(
    tmp_path: Path, ci: SigningKey, other: SigningKey
) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}))
    assert f"key {other.public_text} is not in the policy" in reason(policy, other.sign(SUBJECT))
    policy = read(tmp_path, policy_text({"ci": ci, "other": other}, revoked=(other,)))
    text = reason(policy, other.sign(SUBJECT))
    assert "key other is revoked; sign it with ci:" in text


def test_a_key_counts_through_its_last_day(tmp_path: Path, ci: SigningKey) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}, until={"ci": "2026-11-28"}))
    assert policy.check("a", SUBJECT, [ci.sign(SUBJECT)], today=DAY) == "ci"
    text = reason(policy, ci.sign(SUBJECT), today=DAY + datetime.timedelta(days=1))
    assert "key ci counted until 2026-11-28, today is 2026-11-29 (UTC)" in text
    assert text.endswith("sign it with a key added to the policy")


@pytest.mark.parametrize(
    "subject",
    [
        bundle_subject(b"another bundle"),
        file_subject(b"a bundle"),
        entry_subject(SUBJECT.digests[0], ""),
    ],
)
def test_refuses_the_signature_of_another_content_or_kind(
    tmp_path: Path, ci: SigningKey, subject: policy_module.Subject
) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}))
    text = reason(policy, ci.sign(subject))
    assert "the signature of key ci is for another content" in text


def test_refuses_a_signature_that_names_another_key(
    tmp_path: Path, ci: SigningKey, other: SigningKey
) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}))
    forged = KeySignature(key_id=ci.id, value=other.sign(SUBJECT).value)
    assert "is for another content" in reason(policy, forged)
    assert "is for another content" in reason(policy, KeySignature(key_id=ci.id, value=bytes(64)))


def test_a_message_does_not_list_hundreds_of_signatures(tmp_path: Path, ci: SigningKey) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}))
    many = [KeySignature(key_id=f"{number:064x}", value=bytes(64)) for number in range(300)]
    text = reason(policy, *many)
    assert text.count("is not in the policy") == 5
    assert "295 more signatures do not count either" in text


def test_an_optional_policy_refuses_only_wrong_signatures(
    tmp_path: Path, ci: SigningKey, other: SigningKey
) -> None:
    third = new_key(tmp_path, "third")
    policy = read(tmp_path, policy_text({"ci": ci}, revoked=(third,), required=False))
    assert policy.check("a", SUBJECT, []) is None
    assert "not in the policy" in reason(policy, other.sign(SUBJECT))
    assert policy.check("a", SUBJECT, [ci.sign(SUBJECT)]) == "ci"
    assert "another content" in reason(policy, ci.sign(file_subject(b"")))
    assert "is revoked" in reason(policy, third.sign(SUBJECT))


def test_a_policy_without_keys_refuses_everything(tmp_path: Path, ci: SigningKey) -> None:
    policy = read(tmp_path, "keys: []\n")
    assert "not in the policy" in reason(policy, ci.sign(SUBJECT))


KEY = "YXR4l5ZdvHGj0TSOG5VhtLi7NYYPl+dkqHK+ODELA04="
ENTRY = f"{{name: a, ed25519: {KEY}}}"


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def laughs() -> str:
    """A document whose aliases would expand to 9 ** 20 texts."""
    lines = ["a: &a [x]"]
    for before, name in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu"):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join([*lines, "keys: *u"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the policy: nothing; allowed: keys, and optionally required, revoked"),
        ("[]", "the policy: a list"),
        ("required: true", "the policy: no keys"),
        ("keys:", "keys: nothing; allowed: a list"),
        (f"keys: [{ENTRY}]\ntrust: all", "the policy: the unknown member trust"),
        (f"keys: [{ENTRY}]\nkeys: []", "line 2, column 1: a member's name must be a text, and st"),
        ("keys: [{name: a, name: b}]", "line 1, column 18: a member's name must be a text, and s"),
        ("? [keys]\n: []", "line 1, column 3: a member's name must be a text"),
        ("keys:\n\t- a", "line 2, column 1: found character '\\t' that cannot start any token"),
        (laughs(), "line 2, column 8: aliases are not allowed"),
        ("[" * 60_000, "not YAML: RecursionError"),
        ("\0", "not YAML: ReaderError"),
        (b"\xff\xfe\x00", "not YAML: "),
        (" " * (64 << 10) + " ", "more than 65536 bytes"),
        (f"keys: [{ENTRY}]\n---\nkeys: []", "but found another document"),
        (f"keys: [{ENTRY}]\nrequired: yes", "required: 'yes'; allowed: true or false"),
        (f"keys: [{ENTRY}]\nrequired: [a]", "required: a list; allowed: true or false"),
        (f"keys: [{ENTRY}, {ENTRY}]", "keys[1].name: that of keys[0]; allowed: each once"),
        (f"keys: [{ENTRY}, {ENTRY.replace('a,', 'b,')}]", "keys[1].ed25519: that of keys[0]; "),
        (f"keys: [{{name: '', ed25519: {KEY}}}]", "keys[0].name: nothing; allowed: 1 to 80 print"),
        (f"keys: [{{name: {'n' * 81}, ed25519: {KEY}}}]", "keys[0].name: a text of 81 characters"),
        (f'keys: [{{name: "\\e[1m", ed25519: {KEY}}}]', "keys[0].name: a text of 4 characters"),
        ("keys: [{name: a, ed25519: [x]}]", "keys[0].ed25519: a list; allowed: a public key"),
        (f"keys: [{{name: a, ed25519: {encoded(bytes(33))}}}]", "keys[0].ed25519: 33 bytes in"),
        (f"keys: [{{name: a, ed25519: {KEY}!}}]", "keys[0].ed25519: a text of 45 characters"),
        (f"keys: [{ENTRY}]\nrevoked: [abc]", "revoked[0]: a text of 3 characters"),
        (f"keys: [{ENTRY}]\nrevoked: {KEY}", "revoked: a text of 44 characters; allowed: a list"),
        ("keys: !!python/name:os.system", "keys: nothing; allowed: a list"),
    ],
)
def test_names_what_is_wrong_with_a_policy(
    tmp_path: Path, text: str | bytes, expected: str
) -> None:
    with pytest.raises(SignatureError) as refused:
        read(tmp_path, text)
    assert f"policy {tmp_path / 'policy.yaml'}: " in str(refused.value)
    assert expected in str(refused.value)
    assert KEY not in str(refused.value)  # half of all private keys pass for public ones


@pytest.mark.parametrize(
    "day", ["2026-13-01", "2026-11-28T10:00:00Z", "tomorrow", "20261128", "2026-W48-6", "''"]
)
def test_an_end_is_a_day(tmp_path: Path, day: str) -> None:
    with pytest.raises(SignatureError, match=r"keys\[0\]\.until: .*; allowed: a day, such as"):
        read(tmp_path, f"keys: [{{name: a, ed25519: {KEY}, until: {day}}}]")


def test_a_day_may_be_quoted(tmp_path: Path) -> None:
    policy = read(tmp_path, f"keys: [{{name: '1', ed25519: {KEY}, until: '2026-11-28'}}]")
    assert [(key.name, key.until) for key in policy.keys.values()] == [("1", DAY)]


def weak_points() -> list[bytes]:
    """Every encoding of a point whose order divides 8: y of 255 bits, and the sign of x."""
    p = policy_module._P
    small = [y for y in (*policy_module._WEAK_Y, p, p + 1) if y < 2**255]
    return [(y | sign << 255).to_bytes(32, "little") for y in small for sign in (0, 1)]


@pytest.mark.parametrize("raw", weak_points())
def test_refuses_points_that_anyone_signs_for(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(SignatureError, match="32 bytes that are no ed25519 public key"):
        read(tmp_path, f"keys: [{{name: a, ed25519: {encoded(raw)}}}]")


def test_the_refused_points_are_those_whose_order_divides_8() -> None:
    p, d = policy_module._P, policy_module._D
    for y in policy_module._WEAK_Y:
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        root = pow(square, (p + 3) // 8, p)
        x = root if root * root % p == square else root * pow(2, (p - 1) // 4, p) % p
        assert x * x % p == square
        point = (x, y)
        for _ in range(3):  # doubles it
            x, y = point
            t = d * x * x * y * y % p
            point = 2 * x * y * pow(1 + t, -1, p) % p, (y * y + x * x) * pow(1 - t, -1, p) % p
        assert point == (0, 1)


def test_never_repeats_a_private_key(tmp_path: Path, ci: SigningKey) -> None:
    pem = (tmp_path / "ci.pem").read_text()
    (secret,) = pem.splitlines()[1:-1]
    for text in (
        pem,
        f"keys: [{{name: a, ed25519: {secret}}}]",
        f"keys: {secret}",
        f"revoked: [{secret}]\nkeys: []",
        f"keys: []\n{secret}: 1",
        f"keys: [{{name: a, ed25519: {secret}",
        f"keys: [{{name: {secret}, ed25519: {secret}}}]",
    ):
        with pytest.raises(SignatureError) as refused:
            read(tmp_path, text)
        assert secret[22:30] not in str(refused.value)
        assert refused.value.__cause__ is None
        assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_policy_that_others_can_write_is_refused(tmp_path: Path, ci: SigningKey) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text({"ci": ci}))
    path.chmod(0o666)
    with pytest.raises(SignatureError, match=r"others control it: .*run: chmod go-w"):
        read_policy(path)
    path.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(SignatureError, match="can be written by others"):
        read_policy(path)
    tmp_path.chmod(0o755)
    assert read_policy(path).keys


def test_a_policy_must_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, expected in (
        ("missing", "No such file"),
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("\0", "null"),
    ):
        monkeypatch.setattr(os, "environ", {"NVGEMM_AOT_POLICY": f"{tmp_path}/{name}"})
        with pytest.raises(SignatureError, match=f"cannot read: .*{expected}.*; correct NVGEMM"):
            current_policy()


def test_the_environment_names_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: SigningKey, other: SigningKey
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_POLICY", raising=False)
    assert current_policy() is None
    monkeypatch.setenv("NVGEMM_AOT_POLICY", "")
    assert current_policy() is None
    path = set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": ci})
    first = current_policy()
    assert first is not None
    assert [*first.keys] == [ci.id]
    assert current_policy() is first
    replacement = tmp_path / "new.yaml"
    replacement.write_text(policy_text({"other": other}))
    replacement.replace(path)
    second = current_policy()
    assert second is not None
    assert [*second.keys] == [other.id]


def test_without_cryptography_nothing_signed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: SigningKey
) -> None:
    policy = read(tmp_path, policy_text({"ci": ci}, required=False))
    signature = ci.sign(SUBJECT)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(SignatureError, match=r"cannot be checked: .*pip install '\.\[fleet\]'"):
        policy.check("a", SUBJECT, [signature])
