"""Stores of the remote cache, against real servers: what they keep, and how they fail."""

from __future__ import annotations

import datetime
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

import botocore.auth
import pytest

from nvgemm_aot.storage.remote import shared_directory
from nvgemm_aot.storage.remote.store_urls import open_store
from nvgemm_aot.storage.remote.stores import Secrets, Store, StoreError
from nvgemm_runtime.errors import SettingError
from store_servers import (
    PASSWORD,
    QUOTED,
    S3_KEY,
    S3_SECRET,
    OpenStore,
    Relay,
    Server,
    certificate,
    name_s3,
    redis_server,
    redis_url,
    s3_server,
)

MOST = 1 << 26
LARGE = bytes(range(256)) * 20_000
CANARIES = (PASSWORD, QUOTED, S3_SECRET, S3_KEY)


def failure_of(store: Store, data: bytes | None = None) -> StoreError:
    """The error of a read, or of a write; it shows no credentials."""
    operation = partial(store.get, "key", MOST) if data is None else partial(store.put, "key", data)
    with pytest.raises(StoreError) as raised:
        operation()
    texts = (str(raised.value), repr(raised.value), store.address, str(raised.value.__cause__))
    assert not [text for text in texts for canary in CANARIES if canary in text]
    return raised.value


def test_keeps_values(store: Store) -> None:
    assert store.get("absent", MOST) is None
    for data in (b"one", LARGE, b"two"):
        store.put("key", data)
        assert store.get("key", MOST) == data


def test_reads_no_more_than_asked_for(store: Store) -> None:
    store.put("large", LARGE)
    assert store.get("large", 1000) == LARGE[:1001]


def test_serves_threads(store: Store) -> None:
    def work(number: int) -> bytes | None:
        store.put(f"of {number}", str(number).encode() * 1000)
        return store.get(f"of {number}", MOST)

    with ThreadPoolExecutor(20) as pool:
        assert [*pool.map(work, range(60))] == [str(n).encode() * 1000 for n in range(60)]


def test_a_name_shows_the_server_and_no_credentials(store: Store, store_kind: str) -> None:
    beginnings = {"redis": "redis://127.0.0.1:", "s3": "s3://kernels/some/prefix at http://127."}
    assert store.address.startswith(beginnings.get(store_kind, "file:///"))
    assert not [canary for canary in CANARIES if canary in store.address + repr(store)]


def test_a_server_that_is_gone_may_come_back(open_at: tuple[int, OpenStore]) -> None:
    port, open_there = open_at
    with Relay(port) as relay:
        store = open_there(relay.port, 5.0)
        store.put("key", b"value")
        assert store.get("key", MOST) == b"value"
    assert failure_of(store).is_transient


def test_a_silent_server_is_given_up(open_at: tuple[int, OpenStore]) -> None:
    port, open_there = open_at
    with Relay(port, "silent") as relay:
        assert failure_of(open_there(relay.port)).is_transient


def test_an_answer_byte_by_byte_is_given_up(open_at: tuple[int, OpenStore]) -> None:
    port, open_there = open_at
    store = open_there(port, 10.0)
    store.put("key", LARGE)
    with Relay(port, "drip") as relay:
        assert failure_of(open_there(relay.port)).is_transient


def test_other_bytes_are_an_error(open_at: tuple[int, OpenStore]) -> None:
    port, open_there = open_at
    with Relay(port, "garbage") as relay:
        failure_of(open_there(relay.port))


def test_a_redis_value_without_end_is_an_error(redis: Server) -> None:
    with Relay(redis.port, "endless") as relay:
        error = failure_of(open_store(redis_url(relay.port), 30.0))
    assert "its answer has more than" in str(error)
    assert not error.is_transient


def test_an_object_without_end_is_read_as_far_as_asked_for(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Relay(s3.port, "endless object") as relay:
        store = open_store(name_s3(monkeypatch, relay.port), 30.0)
        assert store.get("key", 1 << 20) == bytes((1 << 20) + 1)
        store.close()


@pytest.mark.parametrize("data", [None, b"value"])
def test_an_error_without_end_is_not_read_to_its_end(
    s3: Server, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    with Relay(s3.port, "endless error") as relay:
        error = failure_of(open_store(name_s3(monkeypatch, relay.port), 3.0), data)
    assert error.is_transient
    assert "no answer within" not in str(error)


@pytest.mark.parametrize("fault", ["denied", "denied without a text"])
def test_a_denied_read_names_the_permissions(
    s3: Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with Relay(s3.port, fault) as relay:
        store = open_store(name_s3(monkeypatch, relay.port), 5.0)
        read, written = failure_of(store), failure_of(store, b"value")
    reason = "AccessDenied: Access Denied" if fault == "denied" else "AccessDenied"
    assert str(read) == f"{reason}; reading needs s3:GetObject and s3:ListBucket"
    assert str(written) == reason
    assert not read.is_transient
    assert not written.is_transient


@pytest.mark.parametrize(
    ("fault", "beginning"),
    [
        ("nested code", "TypeError"),
        ("nested text", "Code: {'A'"),
        ("no elements", "AttributeError"),
        ("no code", "status 403"),
        ("no body", "403: Forbidden"),
    ],
)
def test_an_error_that_is_malformed_is_an_error(
    s3: Server, monkeypatch: pytest.MonkeyPatch, fault: str, beginning: str
) -> None:
    with Relay(s3.port, fault) as relay:
        store = open_store(name_s3(monkeypatch, relay.port), 5.0)
        for data in (None, b"value"):
            assert str(failure_of(store, data)).startswith(beginning)


@pytest.mark.parametrize(
    ("code", "is_transient"),
    [
        ("QuotaExceeded", False),
        ("XMinioStorageFull", False),
        ("SlowDown", True),
        ("RequestTimeout", True),
        ("BadDigest", True),
        ("WebServerIsDown", True),
    ],
)
def test_s3_that_takes_no_more_is_named_and_still_read(
    s3: Server, monkeypatch: pytest.MonkeyPatch, code: str, is_transient: bool
) -> None:
    with Relay(s3.port) as relay:
        store = open_store(name_s3(monkeypatch, relay.port), 5.0)
        store.put("key", b"before")
        relay.fault = code
        for data in (b"value", LARGE):
            error = failure_of(store, data)
            assert (str(error), error.is_transient) == (code, is_transient)
            assert store.get("key", MOST) == b"before"
        relay.fault = ""
        store.put("key", LARGE)
        assert store.get("key", MOST) == LARGE
        store.close()


def test_an_answer_cut_off_in_the_middle_is_an_error(open_at: tuple[int, OpenStore]) -> None:
    port, open_there = open_at
    open_there(port, 10.0).put("key", LARGE)
    with Relay(port, "cut", passed_bytes=100_000) as relay:
        assert failure_of(open_there(relay.port, 5.0)).is_transient


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.slow)])
def own_server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, Store]]:
    """A server of each kind that the test may kill, and its store."""
    with (redis_server if request.param == "redis" else s3_server)(tmp_path) as server:
        is_redis = request.param == "redis"
        url = redis_url(server.port) if is_redis else name_s3(monkeypatch, server.port)
        store = open_store(url, 5.0)
        yield server, store
        store.close()


def test_a_server_killed_in_the_middle_is_an_error(own_server: tuple[Server, Store]) -> None:
    server, store = own_server
    store.put("key", LARGE)
    started, errors = threading.Event(), []

    def read() -> None:
        while True:
            try:
                assert store.get("key", MOST) == LARGE
            except StoreError as error:
                errors.append(error)
                return
            started.set()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    server.kill()
    for thread in threads:
        thread.join()
    assert [error.is_transient for error in errors] == [True] * 3
    failure_of(store, b"other")


def test_a_wrong_password_is_final(redis: Server) -> None:
    error = failure_of(open_store(f"redis://:wrong@127.0.0.1:{redis.port}", 5.0))
    assert not error.is_transient
    assert "invalid username-password pair" in str(error)


def test_a_missing_password_is_final(redis: Server) -> None:
    error = failure_of(open_store(f"redis://127.0.0.1:{redis.port}", 5.0))
    assert not error.is_transient


def test_a_wrong_secret_is_final(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(name_s3(monkeypatch, s3.port, "wrongsecret99"), 5.0)
    error = failure_of(store)
    assert not error.is_transient
    assert "SignatureDoesNotMatch" in str(error)
    assert "wrongsecret99" not in str(error)


def test_a_clock_that_is_off_is_named(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda: now() + datetime.timedelta(hours=2)
    )
    error = failure_of(open_store(name_s3(monkeypatch, s3.port), 5.0))
    assert not error.is_transient
    assert str(error).startswith("RequestTimeTooSkewed")


def test_a_missing_bucket_is_no_miss(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    name_s3(monkeypatch, s3.port)
    error = failure_of(open_store("s3://nosuchbucket/prefix", 5.0), b"value")
    assert not error.is_transient


def test_a_full_redis_is_final_and_still_read(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        store = open_store(redis_url(server.port), 5.0)
        store.put("key", b"small")
        error = failure_of(store, LARGE)
        assert "OutOfMemory" in str(error)
        assert not error.is_transient
        assert store.get("key", MOST) == b"small"


def test_tls_needs_a_certificate_of_a_known_authority(tmp_path: Path) -> None:
    path, key = certificate(tmp_path)
    options = ("--tls-cert-file", str(path), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with redis_server(tmp_path, *options, tls=True) as server:
        url = f"rediss://:{QUOTED}@127.0.0.1:{server.port}/0"
        store = open_store(f"{url}?ssl_ca_certs={path}", 5.0)
        store.put("key", LARGE)
        assert store.get("key", MOST) == LARGE
        assert "certificate verify failed" in str(failure_of(open_store(url, 5.0)))
        failure_of(open_store(redis_url(server.port), 5.0))


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Files of this process that grow beyond a size are an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_directory_keeps_its_files_and_no_half_one(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}", 5.0)
    store.put("key", b"before")
    with largest_file(100_000):
        error = failure_of(store, LARGE)
    assert str(error) == "File too large"
    assert not error.is_transient
    assert store.get("key", MOST) == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["nvgemm-aot-1-key"]


def test_a_missing_directory_is_no_miss(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/nowhere", 5.0)
    for data in (None, b"value"):
        assert str(failure_of(store, data)) == "no such directory; make it first"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_a_directory_is_a_miss(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "nvgemm-aot-1-key")
    assert open_store(f"file://{tmp_path}", 5.0).get("key", MOST) is None


def test_other_users_read_what_a_strict_umask_writes(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        open_store(f"file://{tmp_path}", 5.0).put("key", b"value")
    finally:
        os.umask(before)
    assert (tmp_path / "nvgemm-aot-1-key").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("is_searchable", [True, False])
def test_an_entry_that_this_user_cannot_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_searchable: bool
) -> None:
    """Root reads everything, so the refusal comes from a patch."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shared_directory, "open_regular", refuse)
    monkeypatch.setattr(os, "access", lambda *_: is_searchable)
    store = open_store(f"file://{tmp_path}", 5.0)
    if is_searchable:
        assert store.get("key", MOST) is None
    else:
        assert str(failure_of(store)) == "Permission denied"


def test_a_prefix_may_be_quoted() -> None:
    assert open_store("s3://bucket/team%40site", 5.0).address.startswith("s3://bucket/team@site")


def test_a_directory_may_have_an_at_sign(tmp_path: Path) -> None:
    (tmp_path / "team@site").mkdir()
    assert open_store(f"file://{tmp_path}/team@site", 5.0).get("key", MOST) is None


@pytest.mark.parametrize("secret", ["canary  12\t34", "canary\x0112\u20283"])
def test_a_secret_is_replaced_before_its_characters_are(secret: str) -> None:
    url = urlsplit(f"redis://:{quote(secret)}@h")
    text = Secrets(url).error_text(ValueError(f"no  such\nuser: {secret}"))
    assert text == "ValueError: no such user: ***"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://user:canary1234@host", "scheme http; allowed are redis, rediss, s3, file"),
        ("/shared", "no scheme; allowed"),
        ("file://shared/cache", "three slashes"),
        ("s3://key:canary1234@bucket", "credentials, region"),
        ("s3:///prefix", "S3 takes s3://bucket/prefix"),
        ("redis://:canary1234@host:port", "Port could not be cast"),
        ("redis://:canary1234@host/0?no_such_option=1", "URL is wrong"),
        ("redis://[::1", "is not a URL"),
        ("redis://:canary1234/tail@h:6379/0", "write / as %2F"),
        ("redis://u:12345/canary1234@h", "write / as %2F"),
        ("redis://:canary1234?tail@h:6379/0", "? as %3F"),
        ("redis://:canary1234#tail@h:6379/0", "# as %23"),
        ("rediss://h:6379/0?password=some@canary1234", "@ as %40"),
        ("s3://canary1234:some/tail@bucket/prefix", "s3://bucket/prefix without credentials"),
        ("s3://canary1234:some?tail@bucket/prefix", "s3://bucket/prefix without credentials"),
        ("s3://key:canary1234/prefix", "credentials, region"),
        ("file:///shared#canary1234", "# as %23"),
    ],
)
def test_a_wrong_url_is_named_without_what_it_holds(url: str, reason: str) -> None:
    with pytest.raises(SettingError) as raised:
        open_store(url, 5.0).get("key", MOST)
    assert reason in str(raised.value)
    assert "canary1234" not in str(raised.value) + repr(raised.value.__cause__)
