"""The remote cache over its stores: entries taken and refused, counts, and bounded failures."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.private_key import SigningKey, make_key
from nvgemm_aot.storage.remote.remote_cache import RemoteCache
from nvgemm_aot.storage.remote.signed_entries import decode_entry, encode_entry
from nvgemm_aot.storage.remote.store_trust import StoreTrust
from nvgemm_aot.storage.remote.store_urls import open_store
from nvgemm_aot.storage.remote.stores import Store
from nvgemm_runtime.installed.policy import read_policy
from nvgemm_runtime.installed.signatures import public_text
from store_servers import OpenStore, Relay, Server, name_s3

KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(40)]
PAYLOADS = {key: random.Random(key).randbytes(20_000) for key in KEYS}  # do not compress
MOST = 1 << 26


def accept(key: str, payload: bytes) -> str | None:
    return None if payload == PAYLOADS[key] else "it is another payload"


@pytest.fixture
def signing_key(tmp_path: Path) -> SigningKey:
    return make_key(tmp_path / "key.pem")


@pytest.fixture
def trust(tmp_path: Path, signing_key: SigningKey) -> StoreTrust:
    path = tmp_path / "policy.yaml"
    path.write_text(f"keys: [{{name: ci, ed25519: {public_text(signing_key.public)}}}]\n")
    return StoreTrust(
        policy=read_policy(path), key=signing_key, trusts_store=False, is_read_only=False
    )


@pytest.fixture
def written(tmp_path: Path) -> Cache:
    """A local cache that has all entries."""
    cache = Cache(tmp_path / "written")
    for key, payload in PAYLOADS.items():
        cache.put(key, payload)
    return cache


@pytest.fixture
def empty(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "empty")


@pytest.fixture
def remote(store: Store, trust: StoreTrust) -> Iterator[RemoteCache]:
    with RemoteCache(store, trust, 10.0) as cache:
        yield cache


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir(exist_ok=True)
    return tmp_path / "shared"


@pytest.fixture
def file_remote(shared: Path, trust: StoreTrust) -> RemoteCache:
    return RemoteCache(open_store(f"file://{shared}", 10.0), trust, 10.0)


def test_another_machine_gets_the_entries(
    remote: RemoteCache, written: Cache, empty: Cache
) -> None:
    remote.push(KEYS[:-1], written)
    remote.flush()
    assert remote.fetch(KEYS, empty, accept) == {*KEYS[:-1]}
    assert {key: empty.get(key) for key in KEYS} == PAYLOADS | {KEYS[-1]: None}
    counts = remote.statistics
    assert (counts.pushed, counts.hits, counts.misses) == (39, 39, 1)
    assert counts.bytes_up == counts.bytes_down > 39 * 20_000
    assert (dict(counts.refused), counts.off, counts.unwritten) == ({}, None, None)


def test_leaving_waits_for_what_is_being_sent(
    store: Store, trust: StoreTrust, written: Cache
) -> None:
    with RemoteCache(store, trust, 10.0) as cache:
        cache.push(KEYS, written)
    assert cache.statistics.pushed == len(KEYS)


def poison(shared: Path, key: str, data: bytes) -> None:
    (shared / f"nvgemm-aot-1-{key}").write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("other bytes", "its first bytes differ from NVGEMMRC"),
        ("empty", "it has 0 bytes"),
        ("no signature", "it has no signature"),
        ("foreign key", "is not in the policy"),
        ("signature for another key", "the signature of key ci is for another content"),
        ("copy of another entry", "the signature of key ci is for another content"),
        ("signed and changed", "its payload"),
        ("signed and refused by its reader", "it is another payload"),
    ],
)
def test_a_poisoned_entry_is_refused_and_named_once(
    file_remote: RemoteCache,
    shared: Path,
    written: Cache,
    empty: Cache,
    trust: StoreTrust,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    reason: str,
) -> None:
    key, other = KEYS[:2]
    payload = b"malicious code"
    digest = hashlib.sha256(payload).hexdigest()
    foreign = StoreTrust(
        policy=None, key=make_key(tmp_path / "foreign"), trusts_store=False, is_read_only=False
    )
    file_remote.push([other], written)
    file_remote.flush()
    honest = (shared / f"nvgemm-aot-1-{other}").read_bytes()
    entry = decode_entry(honest)
    data = {
        "other bytes": b"anything else, longer than a header" * 3,
        "empty": b"",
        "no signature": encode_entry(payload, digest, ()),
        "foreign key": encode_entry(payload, digest, foreign.sign(key, digest)),
        "signature for another key": encode_entry(payload, digest, entry.signatures),
        "copy of another entry": honest,
        "signed and changed": encode_entry(payload, "0" * 64, trust.sign(key, "0" * 64)),
        "signed and refused by its reader": encode_entry(payload, digest, trust.sign(key, digest)),
    }[kind]
    poison(shared, key, data)
    assert file_remote.fetch([key, other], empty, accept) == {other}
    assert file_remote.fetch([key], empty, accept) == frozenset()
    assert empty.get(key) is None
    ((refused, count),) = file_remote.statistics.refused.items()
    assert reason in refused
    assert count == 2
    (message,) = caplog.messages
    assert key in message
    assert reason in message


def test_many_reasons_are_counted_together(
    file_remote: RemoteCache,
    shared: Path,
    empty: Cache,
    trust: StoreTrust,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number, key in enumerate(KEYS):
        poison(shared, key, bytes(number))
    assert file_remote.fetch(KEYS, empty, accept) == frozenset()
    refused = file_remote.statistics.refused
    assert len(refused) == len(caplog.messages) == 17
    assert refused["other reasons"] == len(KEYS) - 16


def test_an_entry_whose_check_fails_is_refused(
    file_remote: RemoteCache, written: Cache, empty: Cache
) -> None:
    def fail(key: str, payload: bytes) -> str | None:
        if key == KEYS[0]:
            raise RecursionError(payload)
        return accept(key, payload)

    file_remote.push(KEYS[:2], written)
    file_remote.flush()
    assert file_remote.fetch(KEYS[:2], empty, fail) == {KEYS[1]}
    assert file_remote.statistics.refused == {"it cannot be checked: RecursionError": 1}
    assert empty.get(KEYS[0]) is None


def test_a_refused_entry_is_replaced_by_what_is_compiled(
    file_remote: RemoteCache, shared: Path, written: Cache, empty: Cache
) -> None:
    poison(shared, KEYS[0], b"anything")
    assert file_remote.fetch(KEYS[:1], empty, accept) == frozenset()
    file_remote.push(KEYS[:1], written)
    file_remote.flush()
    assert file_remote.fetch(KEYS[:1], empty, accept) == {KEYS[0]}


def test_bytes_changed_on_the_way_are_refused(
    open_at: tuple[int, OpenStore], trust: StoreTrust, written: Cache, empty: Cache
) -> None:
    port, open_there = open_at
    with RemoteCache(open_there(port, 10.0), trust, 10.0) as cache:
        cache.push(KEYS[:1], written)
    with Relay(port, "flip", passed_bytes=10_000) as relay:
        spoiled = RemoteCache(open_there(relay.port, 10.0), trust, 10.0)
        assert spoiled.fetch(KEYS[:1], empty, accept) == frozenset()
    assert empty.get(KEYS[0]) is None


def test_a_reader_sends_nothing(shared: Path, trust: StoreTrust, written: Cache) -> None:
    reader = StoreTrust(policy=trust.policy, key=None, trusts_store=False, is_read_only=True)
    with RemoteCache(open_store(f"file://{shared}", 10.0), reader, 10.0) as cache:
        cache.push(KEYS, written)
    assert cache.statistics.pushed == 0
    assert [*shared.iterdir()] == []


def test_without_a_policy_nothing_is_asked_for(
    open_at: tuple[int, OpenStore], empty: Cache, signing_key: SigningKey
) -> None:
    port, open_there = open_at
    nobody = StoreTrust(policy=None, key=signing_key, trusts_store=False, is_read_only=True)
    with Relay(port) as relay:
        cache = RemoteCache(open_there(relay.port, 10.0), nobody, 10.0)
        assert cache.fetch(KEYS, empty, accept) == frozenset()
        assert relay.connections == 0


@pytest.mark.parametrize(
    "fault", ["gone", pytest.param("silent", marks=pytest.mark.slow), "garbage", "cut"]
)
def test_a_failing_store_is_given_up_with_one_warning(
    open_at: tuple[int, OpenStore],
    trust: StoreTrust,
    written: Cache,
    empty: Cache,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    port, open_there = open_at
    with Relay(port, fault, passed_bytes=3) as relay:
        if fault == "gone":
            relay.__exit__()
        cache = RemoteCache(open_there(relay.port), trust, 0.5)
        assert cache.fetch(KEYS, empty, accept) == frozenset()
        connections = relay.connections
        cache.push(KEYS, written)
        cache.flush()
        assert cache.fetch(KEYS, empty, accept) == frozenset()
        assert relay.connections == connections, "a store that was given up is left alone"
    (message,) = [text for text in caplog.messages if "remote cache" in text]
    assert "is not used any more by this process, and the local cache serves" in message
    assert f"127.0.0.1:{relay.port}" in message
    assert "canary" not in caplog.text.lower()
    assert cache.statistics.off is not None


def test_a_store_that_answers_too_slowly_is_given_up(
    open_at: tuple[int, OpenStore], trust: StoreTrust, empty: Cache, written: Cache
) -> None:
    """Each operation would end in time, but all together take longer than compiling."""
    port, open_there = open_at
    with Relay(port, "silent") as relay:
        cache = RemoteCache(open_there(relay.port, 60.0), trust, 0.1)
        assert cache.fetch(KEYS[:2], empty, accept) == frozenset()
    assert "it is too slow: 2 entries not done" in str(cache.statistics.off)


def test_a_store_that_takes_no_entries_is_still_read(
    file_remote: RemoteCache,
    shared: Path,
    written: Cache,
    empty: Cache,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file_remote.push(KEYS[:3], written)
    file_remote.flush()
    # A directory where an entry's file should be: replacing it fails, for root too.
    (shared / f"nvgemm-aot-1-{KEYS[3]}").mkdir()
    file_remote.push(KEYS[3:4], written)
    file_remote.flush()
    file_remote.push(KEYS[4:], written)
    file_remote.flush()
    assert file_remote.fetch(KEYS[:3], empty, accept) == {*KEYS[:3]}
    counts = file_remote.statistics
    assert (counts.pushed, counts.off, counts.unwritten) == (3, None, "Is a directory")
    (message,) = caplog.messages
    assert "takes no entries of this process any more" in message


def test_a_full_bucket_is_still_read(
    s3: Server,
    trust: StoreTrust,
    written: Cache,
    empty: Cache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Relay(s3.port) as relay,
        RemoteCache(open_store(name_s3(monkeypatch, relay.port), 5.0), trust, 5.0) as cache,
    ):
        cache.push(KEYS[:3], written)
        cache.flush()
        relay.fault = "QuotaExceeded"
        cache.push(KEYS[3:], written)
        cache.flush()
        assert cache.fetch(KEYS[:3], empty, accept) == {*KEYS[:3]}
    counts = cache.statistics
    assert (counts.pushed, counts.off, counts.unwritten) == (3, None, "QuotaExceeded")
    (message,) = caplog.messages
    assert "takes no entries of this process any more: QuotaExceeded" in message


def test_a_full_local_cache_is_no_failure_of_the_store(
    file_remote: RemoteCache, written: Cache, tmp_path: Path
) -> None:
    file_remote.push(KEYS[:1], written)
    file_remote.flush()
    (tmp_path / "file").write_text("no directory")
    assert file_remote.fetch(KEYS[:1], Cache(tmp_path / "file"), accept) == frozenset()
    assert file_remote.statistics.off is None


def test_probe_says_why_a_store_does_not_answer(
    open_at: tuple[int, OpenStore], trust: StoreTrust
) -> None:
    port, open_there = open_at
    answering = RemoteCache(open_there(port, 10.0), trust, 10.0)
    assert answering.probe() is None
    assert answering.probe_writing() is None
    assert answering.probe() is None
    with Relay(port, "silent") as relay:
        reason = RemoteCache(open_there(relay.port), trust, 0.5).probe()
    assert reason is not None
    assert "canary" not in reason.lower()
