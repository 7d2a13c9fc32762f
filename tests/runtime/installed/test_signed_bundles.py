"""Bundles and confirmations of a process with a policy: what it leaves out, and why."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from confirmed_kernels import confirmations_of
from forked_scripts import ForkedScripts, forked_scripts
from installed_bundles import install_wheels
from nvgemm_aot.bundle.wheel_set import encode_wheels
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.private_key import SigningKey
from nvgemm_runtime.bundle.confirmations import encode_confirmations
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import RequiredError
from nvgemm_runtime.installed import digest, discover, required
from nvgemm_runtime.installed.discover import find_bundles
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.installed.signatures import signature_path
from signing_keys import new_key, set_policy, sign_bundle, sign_content
from synthetic_bundles import write_synthetic_bundle
from synthetic_content import synthetic_content

REGISTRY = "nvgemm_runtime.installed.registry"


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has just started, without wheels, confirmations and a JIT cache."""
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path / "confirmed"))
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NVGEMM_AOT_POLICY", raising=False)
    digest.forget()
    yield
    digest.forget()


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "named"
    directory.mkdir()
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", str(directory))
    return directory


@pytest.fixture
def ci(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path, "ci")


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: SigningKey) -> Path:
    return set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": ci})


def add(directory: Path, name: str, seed: int = 0) -> Path:
    path = directory / f"{name}.nvgemm"
    write_bundle(path, synthetic_content(kernels=2, problems=2, seed=seed))
    return path


def problems(installation: Installation) -> dict[str, str | None]:
    return {found.path.name: found.problem for found in installation.shipped_bundles()}


def test_unsigned_bundles_are_left_out_with_one_warning_each(
    named: Path, ci: SigningKey, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sign_bundle(add(named, "signed"), ci)
    add(named, "unsigned", seed=1)
    installation = Installation()
    with caplog.at_level(logging.WARNING, REGISTRY):
        installation.bundles()
        installation.bundles()
    assert len(caplog.records) == 1
    found = problems(installation)
    assert found["signed.nvgemm"] is None
    assert f"unsigned.nvgemm: no key that counts in the policy {policy} signed it" in str(
        found["unsigned.nvgemm"]
    )
    assert len(installation.kernels()) == 2


def test_a_copied_signature_is_for_another_content(
    named: Path, ci: SigningKey, policy: Path
) -> None:
    signed, other = sign_bundle(add(named, "signed"), ci), add(named, "other", seed=1)
    signature_path(other).write_bytes(signature_path(signed).read_bytes())
    assert "for another content" in str(problems(Installation())["other.nvgemm"])


def test_a_signature_of_kind_file_does_not_sign_a_bundle(
    named: Path, ci: SigningKey, policy: Path
) -> None:
    sign_content(add(named, "a"), ci)
    assert "for another content" in str(problems(Installation())["a.nvgemm"])


def test_a_bundle_with_another_body_breaks_its_digests(
    named: Path, ci: SigningKey, policy: Path
) -> None:
    """The signature covers the prefix; each part behind it has a digest in the one before."""
    path = sign_bundle(add(named, "a"), ci)
    data = bytearray(path.read_bytes())
    data[100] ^= 1  # the header
    path.write_bytes(data)
    assert "[header-digest]" in str(problems(Installation())["a.nvgemm"])


@pytest.mark.parametrize("damage", ["truncated", "huge", "directory", "pipe"])
def test_a_damaged_signature_file_leaves_its_bundle_out(
    damage: str, named: Path, ci: SigningKey, policy: Path
) -> None:
    path = sign_bundle(add(named, "a"), ci)
    beside = signature_path(path)
    if damage == "truncated":
        beside.write_bytes(beside.read_bytes()[:-20])
    elif damage == "huge":
        with beside.open("ab") as file:
            file.truncate(1 << 40)
    else:
        beside.unlink()
        beside.mkdir() if damage == "directory" else os.mkfifo(beside)
    assert str(problems(Installation())["a.nvgemm"]).endswith("sign again: nvgemm-aot sign")


def test_a_file_of_a_wheel_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: SigningKey, policy: Path
) -> None:
    for arch, is_signed in (("sm_90a", True), ("sm_100f", False)):
        path = write_synthetic_bundle(tmp_path / f"{arch}.nvgemm", arch)
        if is_signed:
            sign_bundle(path, ci)
        with monkeypatch.context() as patch:
            patch.delenv("NVGEMM_AOT_POLICY")
            [wheel] = encode_wheels([path], name=arch, version="1.0")
        (tmp_path / wheel.filename).write_bytes(wheel.data)
    install_wheels(monkeypatch, tmp_path / "site", *tmp_path.glob("*.whl"))
    by_arch = {file.path.name.split("-")[0]: file for file in find_bundles()}
    assert by_arch["sm_90a"].problem is None
    assert by_arch["sm_100f"].is_refused
    assert "it has no signature" in str(by_arch["sm_100f"].problem)


def test_a_file_replaced_after_the_check_is_not_used(
    named: Path, ci: SigningKey, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = sign_bundle(add(named, "a"), ci), add(named.parent, "other", seed=1)

    def replaced(*arguments: object, **named: object) -> Bundle:
        other.replace(path)
        return Bundle(path)

    monkeypatch.setattr(f"{REGISTRY}.Bundle", replaced)
    (problem,) = problems(Installation()).values()
    assert "replaced after its signature was checked; start again" in str(problem)


def test_a_broken_policy_leaves_all_out_with_one_warning(
    named: Path, ci: SigningKey, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, name in enumerate("ab"):
        sign_bundle(add(named, name, seed), ci)
    policy.write_text("keys: 1")
    installation = Installation()
    with caplog.at_level(logging.WARNING, REGISTRY):
        assert {*problems(installation).values()} == {
            f"policy {policy}: keys: a text of 1 characters; allowed: a list"
        }
    assert len(caplog.records) == 1
    assert installation.kernels() == {}


def test_mode_required_ends_with_the_reason_and_the_next_step(
    named: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(named, "a")
    monkeypatch.setattr(required, "INSTALLATION", Installation())
    with pytest.raises(RequiredError) as error:
        required.require_opened()
    assert "a.nvgemm: no key that counts in the policy" in str(error.value)
    assert str(error.value).endswith("correct the policy in NVGEMM_AOT_POLICY")


def test_an_optional_policy_accepts_what_is_unsigned(
    named: Path, tmp_path: Path, ci: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add(named, "a")
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": ci}, required=False)
    assert problems(Installation()) == {"a.nvgemm": None}
    sign_content(path, ci)
    assert "for another content" in str(problems(Installation())["a.nvgemm"])


def test_kernels_compiled_here_need_no_signature(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVGEMM_AOT_BUNDLES", raising=False)
    (tmp_path / "cache" / "jit").mkdir(parents=True)
    add(tmp_path / "cache" / "jit", "own")
    (own,) = Installation().bundles()
    assert (own.problem, own.bundle is not None) == (None, True)


def test_a_bundle_that_cannot_be_read_keeps_its_own_reason(named: Path, policy: Path) -> None:
    (named / "a.nvgemm").mkdir()
    (named / "b.nvgemm").write_bytes(b"short")
    found = problems(Installation())
    assert "not a regular file; name a bundle" in str(found["a.nvgemm"])
    assert "no key that counts" in str(found["b.nvgemm"])


def test_unsigned_confirmations_are_left_out(
    named: Path, tmp_path: Path, ci: SigningKey, policy: Path
) -> None:
    sign_bundle(add(named, "a"), ci)
    own = tmp_path / "confirmed"
    own.mkdir()
    paths = [named / "n.confirmed.json", own / "o.confirmed.json"]
    for path in paths:
        path.write_bytes(encode_confirmations(confirmations_of("a" * 64)))
    refused = Installation().confirmed_files()
    assert {file.path for file in refused} == {*paths}
    for file in refused:
        assert (file.data, file.confirmations) == (None, None)
        assert "it has no signature; sign it with ci" in str(file.problem)
    for path in paths:
        sign_content(path, ci)
    for file in Installation().confirmed_files():
        assert (file.problem, file.data) == (None, encode_confirmations(confirmations_of("a" * 64)))


def test_the_digest_follows_the_policy(
    named: Path, ci: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add(named, "a")
    without = digest.installed_digest()
    set_policy(monkeypatch, tmp_path / "policy.yaml", {"ci": ci})
    refused = digest.installed_digest()
    assert refused != without
    sign_bundle(path, ci)
    assert digest.installed_digest() == without, "a signature changes no kernel"
    Installation().bundles()
    assert digest.installed_digest() == without, "what is opened is what was looked for"


def test_the_digest_of_an_opened_refused_bundle_is_that_of_the_search(
    named: Path, policy: Path
) -> None:
    add(named, "a")
    before = digest.installed_digest()
    Installation().bundles()
    assert digest.installed_digest() == before


def test_a_pipe_among_confirmations_is_not_waited_for(named: Path, tmp_path: Path) -> None:
    add(named, "a")
    os.mkfifo(named / "p.confirmed.json")
    (file,) = Installation().confirmed_files()
    assert "cannot be read" in str(file.problem)


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkedScripts]:
    with forked_scripts("", python=[sys.executable]) as scripts:
        yield scripts


def test_without_a_policy_nothing_more_is_imported(
    named: Path, scripts: ForkedScripts, tmp_path: Path
) -> None:
    add(named, "a")
    script = f"""
import os, sys
os.environ["NVGEMM_AOT_BUNDLES"] = {str(named)!r}
from nvgemm_runtime.installed.digest import installed_digest
from nvgemm_runtime.installed.discover import find_bundles
installed_digest()
assert [file.problem for file in find_bundles() if "named" in str(file.path)] == [None]
print(sorted(name for name in sys.modules if name in
    ("yaml", "cryptography", "nvgemm_runtime.installed.policy",
     "nvgemm_runtime.installed.signatures")))
"""
    result = scripts.run(script)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_finding_is_unchanged_without_a_policy(named: Path) -> None:
    add(named, "a")
    (file,) = discover.find_bundles()
    assert (file.problem, file.is_refused, file.checked_prefix) == (None, False, None)
