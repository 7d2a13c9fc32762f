"""Signature files in wheels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from confirmed_kernels import confirmations_of
from installed_bundles import install_wheels
from nvgemm_aot.bundle import wheel_set
from nvgemm_aot.bundle.compression import compress_quickly
from nvgemm_aot.bundle.wheel_set import encode_wheels
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.private_key import SigningKey
from nvgemm_runtime.bundle.confirmations import encode_confirmations
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import SignatureError
from nvgemm_runtime.installed import digest
from nvgemm_runtime.installed.discover import find_bundles
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.installed.signatures import signature_path
from signing_keys import new_key, set_policy, sign_bundle, sign_content
from synthetic_bundles import write_synthetic_bundle
from varied_content import varied_content

PACKAGE = "nvgemm_kernels_demo"


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path, "key")


@pytest.fixture
def bundles(tmp_path: Path, key: SigningKey) -> list[Path]:
    archs = ("sm_90a", "sm_100f")
    paths = [write_synthetic_bundle(tmp_path / f"{arch}.nvgemm", arch) for arch in archs]
    return [sign_bundle(path, key) for path in paths]


def pack(bundles: list[Path]) -> bytes:
    [wheel] = encode_wheels(bundles, name="demo", version="1.0")
    return wheel.data


def test_each_bundle_keeps_its_signature(bundles: list[Path], tmp_path: Path) -> None:
    data = pack(bundles)
    assert pack(bundles[::-1]) == data, "in any order"
    wheel = tmp_path / f"{PACKAGE}-1.0-py3-none-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(data)
    with ZipFile(wheel) as archive:
        record = archive.read(f"{PACKAGE}-1.0.dist-info/RECORD").decode()
        for path in bundles:
            inner = f"{PACKAGE}/{path.stem}-linux_x86_64-cu13.nvgemm.sig"
            assert archive.read(inner) == signature_path(path).read_bytes()
            assert f"{inner},sha256=" in record
    for tool in ("check_wheel_contents", "twine check --strict"):
        command = [sys.executable, "-m", *tool.split(), str(wheel)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_unsigned_bundles_are_packed_as_before(bundles: list[Path]) -> None:
    signature_path(bundles[0]).unlink()
    one_signed = pack(bundles)
    signature_path(bundles[1]).unlink()
    none_signed = pack(bundles)
    assert one_signed.count(b".sig") > none_signed.count(b".sig") == 0


def test_signatures_of_other_content_are_not_packed(bundles: list[Path], key: SigningKey) -> None:
    sign_content(bundles[0], key)
    with pytest.raises(SignatureError, match=r"sm_90a\.nvgemm: the signature of key .* is for ano"):
        pack(bundles)


def test_the_policy_holds_for_what_is_packed(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: SigningKey
) -> None:
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"key": key})
    pack(bundles)
    signature_path(bundles[0]).unlink()
    with pytest.raises(SignatureError, match=r"sm_90a\.nvgemm: no key .* it has no signature"):
        pack(bundles)


def test_confirmations_keep_their_signature_and_count_where_installed(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: SigningKey
) -> None:
    with Bundle(bundles[0]) as bundle:
        (kernel,) = bundle.header.kernels
    confirmed = tmp_path / "a.confirmed.json"
    confirmed.write_bytes(encode_confirmations(confirmations_of(kernel.id)))
    sign_content(confirmed, key)
    [wheel] = encode_wheels(bundles, name="demo", version="1.0", confirmed=[confirmed])
    (tmp_path / wheel.filename).write_bytes(wheel.data)
    install_wheels(monkeypatch, tmp_path / "site", tmp_path / wheel.filename)
    (installed,) = (tmp_path / "site" / PACKAGE).glob("*.confirmed.json")
    assert signature_path(installed).read_bytes() == signature_path(confirmed).read_bytes()
    monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path / "none"))
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"key": key})
    installation = Installation()
    assert [found.problem for found in installation.shipped_bundles()] == [None, None]
    assert [(one.path, one.problem) for one in installation.confirmed_files()] == [
        (installed, None)
    ]
    digest.forget()


def test_confirmations_that_were_changed_by_hand_are_not_packed(
    bundles: list[Path], tmp_path: Path, key: SigningKey
) -> None:
    """A wheel holds them in canonical form, which another form's signature does not sign."""
    with Bundle(bundles[0]) as bundle:
        (kernel,) = bundle.header.kernels
    confirmed = tmp_path / "a.confirmed.json"
    confirmed.write_bytes(encode_confirmations(confirmations_of(kernel.id)) + b" ")
    sign_content(confirmed, key)
    with pytest.raises(SignatureError, match="is for another content"):
        encode_wheels(bundles, name="demo", version="1.0", confirmed=[confirmed])


def test_parts_of_a_signed_bundle_are_signed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: SigningKey
) -> None:
    large = tmp_path / "mine.nvgemm"
    write_bundle(large, varied_content(rows=8, kernels=24, payload_bytes=9000), compress_quickly)
    monkeypatch.setattr(wheel_set, "MAX_WHEEL_BYTES", 300_000)
    unsigned = encode_wheels([large], name="mine", version="1.0", key=key)
    assert len(unsigned) == 3
    assert not [wheel for wheel in unsigned if b".sig" in wheel.data]
    sign_bundle(large, key)
    with pytest.raises(SignatureError, match="parts need signatures of their own: set NVGEMM_AOT_"):
        encode_wheels([large], name="mine", version="1.0")
    signed = encode_wheels([large], name="mine", version="1.0", key=key)
    assert signed == encode_wheels([large], name="mine", version="1.0", key=key)
    assert all(len(wheel.data) <= 300_000 for wheel in signed)
    for wheel in signed:
        (tmp_path / wheel.filename).write_bytes(wheel.data)
    install_wheels(monkeypatch, tmp_path / "site", *tmp_path.glob("*.whl"))
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"key": key})
    found = find_bundles()
    assert [file.problem for file in found] == [None] * len(signed)
    other = new_key(tmp_path, "other")
    with pytest.raises(SignatureError, match=f"key {re.escape(other.public_text)} is not in the"):
        encode_wheels([large], name="mine", version="1.0", key=other)
