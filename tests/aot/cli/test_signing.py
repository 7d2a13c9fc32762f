"""``keygen`` and ``sign``, and what other commands say and do about signatures."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import cpu_provider
from fake_provider import FakeProvider
from made_rankings import entry, rankings
from nvgemm_aot.cli.main import main
from nvgemm_aot.pipeline import pipeline
from nvgemm_aot.rankings.file import write_rankings
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.private_key import SigningKey, read_key
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.installed.policy import read_policy
from nvgemm_runtime.installed.signatures import read_signatures, signature_path
from signing_keys import new_key, set_policy, sign_bundle, sign_content
from synthetic_bundles import write_synthetic_bundle
from tuning_bench import build as build_for_cpu

MANIFEST = """
version: 1
name: some
targets: [sm_100f]
gemms:
  - {dtype: bf16, mnk: [[16, 512, 256]]}
"""

BUILT = "out/some-sm_100f-linux_x86_64-cu13.nvgemm"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a manifest, and neither policy nor key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVGEMM_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NVGEMM_AOT_POLICY", raising=False)
    monkeypatch.delenv("NVGEMM_AOT_SIGNING_KEY", raising=False)
    monkeypatch.setattr(pipeline, "default_providers", lambda signatures: (FakeProvider.name,))
    (tmp_path / "some.yaml").write_text(MANIFEST)
    return tmp_path


@pytest.fixture
def key(directory: Path) -> SigningKey:
    return new_key(directory, "ci")


@pytest.fixture
def bundle(directory: Path) -> Path:
    return write_synthetic_bundle(Path("a.nvgemm"), "sm_90a")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def done(*arguments: str | Path) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def signers(path: Path | str) -> list[str]:
    return [one.key_id for one in read_signatures(Path(path))]


def test_keygen_prints_what_a_policy_takes(directory: Path) -> None:
    result = done("keygen", "keys/ci 2027.pem")
    key = read_key(Path("keys/ci 2027.pem"))
    Path("policy.yaml").write_text(f"keys:\n{result.stdout}")
    policy = read_policy(Path("policy.yaml"))
    assert {name: one.name for name, one in policy.keys.items()} == {key.id: "ci 2027"}
    assert Path("keys/ci 2027.pem").read_text().splitlines()[1][22:] not in result.output
    again = run("keygen", "keys/ci 2027.pem")
    assert again.exit_code == 16
    assert "a key is never replaced" in again.stderr
    assert json.loads(done("keygen", "b.pem", "--json").stdout) == {
        "path": "b.pem",
        "name": "b",
        "ed25519": read_key(Path("b.pem")).public_text,
    }


def test_sign_signs_every_kind_of_file(
    bundle: Path, key: SigningKey, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rankings(Path("r.json"), rankings(entry({"a": 1000})))
    result = done("sign", bundle, "r.json", "--key", "ci.pem")
    assert (
        f"a.nvgemm.sig: written, signed by key {key.public_text}; no policy is set" in result.stdout
    )
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", "ci.pem")
    before = signature_path(bundle).read_bytes()
    result = done("sign", bundle, "r.json")
    assert "r.json.sig: written, signed by ci; the policy accepts it" in result.stdout
    assert signature_path(bundle).read_bytes() == before


def test_a_second_key_is_added_and_the_policy_judges_each(
    bundle: Path, key: SigningKey, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_key(directory, "other")
    set_policy(monkeypatch, directory / "policy.yaml", {"other": other})
    done("sign", bundle, "--key", "ci.pem")
    (document,) = json.loads(done("sign", bundle, "--key", "other.pem", "--json").stdout)
    assert document["path"] == "a.nvgemm"
    assert document["signature_file"] == "a.nvgemm.sig"
    assert document["refusal"] is None
    by_key = {one["key"]: (one["name"], one["fault"]) for one in document["signatures"]}
    assert by_key == {
        other.public_text: ("other", None),
        key.public_text: (None, f"key {key.public_text} is not in the policy"),
    }


def test_nothing_is_signed_unless_all_is_intact(bundle: Path, key: SigningKey) -> None:
    whole = write_synthetic_bundle(Path("b.nvgemm"), "sm_100f")
    data = bytearray(whole.read_bytes())
    data[-1] ^= 1
    whole.write_bytes(data)
    result = run("sign", bundle, whole, "--key", "ci.pem")
    assert result.exit_code == 20
    assert "[body-digest]" in result.stderr
    assert not signature_path(bundle).exists()


@pytest.mark.parametrize(
    ("name", "content", "code", "expected"),
    [
        ("missing.nvgemm", None, 16, "missing.nvgemm: cannot be read: No such file"),
        ("a.whl", b"PK", 28, "a.whl: a wheel is not signed; sign its bundles, then pack them"),
        ("a.sig", b"{}", 28, "only bundles, rankings files and confirmations are signed; this is"),
        ("a.txt", b"text", 28, "a.txt: only bundles, rankings files and confirmations are signed"),
        ("a.txt", b"[" * 60_000, 28, "only bundles, rankings files and confirmations are signed"),
        ("a.json", b'{"format": "nvgemm-aot rankings"}', 26, "a.json: version is None"),
        ("a.json", b'{"format": "confirmations of nvgemm-aot"}', 26, "a.json"),
        (".", None, 16, "cannot be read: Is a directory"),
    ],
)
def test_sign_refuses_what_nothing_reads(
    key: SigningKey, name: str, content: bytes | None, code: int, expected: str
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    result = run("sign", name, "--key", "ci.pem")
    assert (result.exit_code, result.stdout) == (code, "")
    assert expected in result.stderr
    assert not [*Path().glob("*.sig.sig")]


def test_sign_needs_a_key(bundle: Path) -> None:
    result = run("sign", bundle)
    assert result.exit_code == 2
    assert "name the private key with --key or NVGEMM_AOT_SIGNING_KEY" in result.stderr
    result = run("sign", bundle, "--key", "none.pem")
    assert result.exit_code == 28
    assert "private key none.pem: cannot read: No such file or directory" in result.stderr


def test_inspect_says_who_signed(
    bundle: Path, key: SigningKey, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not signed; no policy is set" in done("inspect", bundle).stdout
    sign_bundle(bundle, key)
    done("wheel", bundle, "--name", "demo", "-o", "wheels")
    (wheel,) = Path("wheels").glob("nvgemm_kernels_demo*.whl")
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key}, until={"ci": "2020-01-01"})
    for path in (bundle, wheel):
        shown = done("inspect", path).stdout
        assert "signed by ci (does not count); refused: " in shown
        assert "key ci counted until 2020-01-01, today is" in shown
        document = json.loads(done("inspect", path, "--json").stdout)
        document = document[0] if path == wheel else document
        assert document["policy"] == str(directory / "policy.yaml")
        assert document["signatures"][0]["name"] == "ci"
    monkeypatch.setenv("NVGEMM_AOT_POLICY", "missing.yaml")
    assert run("inspect", bundle).exit_code == 28


def verdict(*paths: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    result = run("verify", *paths, "--json", "--no-disassemble")
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_verify_refuses_what_the_policy_refuses(
    key: SigningKey, directory: Path, kernel_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = cpu_provider.problem(sizes=(8, 32, 64))
    built = build_for_cpu([problem], directory / "cpu", kernel_cache)
    code, (document,), _ = verdict(built)
    assert (code, document["ok"], document["signatures"]) == (0, True, [])
    policy = set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    code, (document,), error = verdict(built)
    assert (code, document["ok"]) == (28, True)
    assert f"{built}: no key that counts in the policy {policy}" in error
    sign_bundle(built, key)
    code, (document,), _ = verdict(built)
    assert (code, document["signatures"][0]["name"]) == (0, "ci")
    monkeypatch.delenv("NVGEMM_AOT_POLICY")
    sign_content(built, key)
    code, _, error = verdict(built)
    assert code == 28
    assert f"the signature of key {key.public_text} is for another content; sign again" in error


def test_build_signs_before_it_packs(
    directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", "ci.pem")
    result = done("build", "some.yaml", "-o", "out", "--wheel")
    assert signers(BUILT) == [key.id]
    (wheel,) = Path("out").glob("nvgemm_kernels_some*.whl")
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".sig")]
    assert packed == ["nvgemm_kernels_some/sm_100f-linux_x86_64-cu13.nvgemm.sig"]
    assert f"nvgemm-aot: 1 file signed with key {key.public_text}\n" in result.stderr
    assert "no key that counts" not in result.stderr
    assert "up to date" in done("build", "some.yaml", "-o", "out").stdout
    assert signers(BUILT) == [key.id]


def test_build_signs_no_bundle_that_another_wrote(
    directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can write a file with the build's key into an output directory that is restored."""
    done("build", "some.yaml", "-o", "out")
    built = Path(BUILT).read_bytes()
    with Bundle(Path(BUILT)) as bundle:
        build_key = bundle.header.build_key
    other = new_key(directory, "other")
    forged = write_synthetic_bundle(directory / "forged.nvgemm", "sm_100f", build_key=build_key)
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", "ci.pem")
    for signer in (None, other):
        Path(BUILT).write_bytes(forged.read_bytes())
        signature_path(Path(BUILT)).unlink(missing_ok=True)
        if signer is not None:
            sign_bundle(Path(BUILT), signer)
        assert "up to date" not in done("build", "some.yaml", "-o", "out").stdout
        assert Path(BUILT).read_bytes() == built
        assert signers(BUILT) == [key.id]
    signature = signature_path(Path(BUILT)).read_bytes()
    Path(BUILT).write_bytes(forged.read_bytes())
    done("build", "some.yaml", "-o", "out")
    assert Path(BUILT).read_bytes() == built
    assert signature_path(Path(BUILT)).read_bytes() == signature


def test_an_unsigned_bundle_is_written_again_from_the_cache(
    directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("build", "some.yaml", "-o", "out")
    built = Path(BUILT).read_bytes()
    sign_bundle(Path(BUILT), new_key(directory, "other"))
    others = signers(BUILT)
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", "ci.pem")
    document = json.loads(done("build", "some.yaml", "-o", "out", "--json").stdout)
    assert document["compiled"] == 0
    assert Path(BUILT).read_bytes() == built
    assert {*signers(BUILT)} == {key.id, *others}


def test_build_without_a_key_names_what_the_policy_refuses(
    directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    result = done("build", "some.yaml", "-o", "out")
    assert f"nvgemm-aot: {BUILT}: no key that counts in the policy" in result.stderr
    result = run("build", "some.yaml", "-o", "out", "--wheel")
    assert result.exit_code == 28
    assert not [*Path("out").glob("*.whl")]


def test_a_key_that_cannot_be_read_stops_a_build_before_it_compiles(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", "missing.pem")
    result = run("build", "some.yaml", "-o", "out")
    assert result.exit_code == 28
    assert "private key missing.pem: cannot read" in result.stderr
    assert not Path("out").exists()


def test_a_rewritten_bundle_loses_its_signatures(directory: Path, key: SigningKey) -> None:
    done("build", "some.yaml", "-o", "out")
    sign_bundle(Path(BUILT), key)
    Path("some.yaml").write_text(MANIFEST.replace("512", "1024"))
    done("build", "some.yaml", "-o", "out")
    assert not signature_path(Path(BUILT)).exists()


def test_rankings_signed_by_nobody_known_are_refused(
    directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_key(directory, "other")
    write_rankings(Path("r.json"), rankings(entry({"a": 1000})))
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    refused = (
        ("rankings", "merge", "r.json", "-o", "m.json"),
        ("build", "some.yaml", "-o", "out", "--rankings", "r.json"),
    )
    for arguments in refused:
        result = run(*arguments)
        assert result.exit_code == 28
        assert "r.json: no key that counts in the policy" in result.stderr
        assert "it has no signature" in result.stderr
    sign_content(Path("r.json"), other)
    for arguments in refused:
        result = run(*arguments)
        assert result.exit_code == 28
        assert f"key {other.public_text} is not in the policy" in result.stderr
    assert not Path("m.json").exists()
    assert not Path("out").exists()
    done("rankings", "show", "r.json")
    done("rankings", "diff", "r.json", "shipped")
    sign_content(Path("r.json"), key)
    monkeypatch.setenv("NVGEMM_AOT_SIGNING_KEY", "ci.pem")
    done("rankings", "merge", "r.json", "llama-3.1-8b", "-o", "m.json")
    assert signers("m.json") == [key.id]
    done("build", "some.yaml", "-o", "out", "--rankings", "m.json")


def test_export_takes_no_rankings_from_a_refused_bundle(
    bundle: Path, directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    result = run("rankings", "export", bundle, "-o", "r.json")
    assert result.exit_code == 28
    sign_bundle(bundle, key)
    result = run("rankings", "export", bundle, "-o", "r.json")
    assert result.exit_code == 26
    assert "no ranking is measured" in result.stderr


def test_coverage_counts_no_refused_bundle(
    bundle: Path, directory: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_bundle(bundle, key)
    done("wheel", bundle, "--name", "demo", "-o", "wheels")
    (wheel,) = Path("wheels").glob("nvgemm_kernels_demo*.whl")
    set_policy(monkeypatch, directory / "policy.yaml", {"ci": key})
    done("coverage", "some.yaml", bundle)
    done("coverage", "some.yaml", wheel)
    set_policy(monkeypatch, directory / "policy.yaml", {"other": new_key(directory, "other")})
    for path in (bundle, wheel):
        result = run("coverage", "some.yaml", path)
        assert result.exit_code == 28
        assert f"{path}" in result.stderr


def test_no_command_goes_on_with_a_broken_policy(
    bundle: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rankings(Path("r.json"), rankings(entry({"a": 1000})))
    Path("policy.yaml").write_text("keys: 1")
    monkeypatch.setenv("NVGEMM_AOT_POLICY", "policy.yaml")
    for arguments in (
        ("inspect", bundle),
        ("verify", bundle),
        ("coverage", "some.yaml", bundle),
        ("build", "some.yaml", "-o", "out"),
        ("tune", bundle, "-o", "tuned.nvgemm"),
        ("confirm",),
        ("wheel", bundle, "--name", "demo"),
        ("rankings", "merge", "r.json", "-o", "m.json"),
        ("rankings", "export", bundle, "-o", "m.json"),
    ):
        result = run(*arguments)
        assert result.exit_code == 28, (arguments, result.output)
        assert "policy.yaml: keys: a text of 1 characters; allowed: a list" in result.stderr
    assert not Path("out").exists()


def test_keygen_quotes_a_name_that_yaml_would_read_otherwise(directory: Path) -> None:
    entry_text = done("keygen", "2027-06-30.pem").stdout
    assert yaml.safe_load(entry_text)[0]["name"] == "2027-06-30"


def test_the_prefix_is_that_of_the_open_file(bundle: Path) -> None:
    with Bundle(bundle) as opened:
        assert opened.prefix == bundle.read_bytes()[:48]
