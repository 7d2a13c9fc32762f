"""Servers that the tests of the remote cache share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvgemm_aot.storage.remote.store_urls import open_store
from nvgemm_aot.storage.remote.stores import Store
from store_servers import OpenStore, Server, any_s3_server, name_s3, redis_server, redis_url


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with any_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["redis", "s3", "file"])
def store_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store_url(
    store_kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A store of each kind, at its real server."""
    if store_kind == "file":
        (tmp_path / "shared").mkdir()
        return f"file://{tmp_path}/shared"
    server: Server = request.getfixturevalue(store_kind)
    if store_kind == "redis":
        return redis_url(server.port)
    return name_s3(monkeypatch, server.port)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = open_store(store_url, 10.0)
    yield opened
    opened.close()


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.slow)])
def open_at(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, OpenStore]]:
    """The port of a server of each kind, and a function that opens a store at another."""
    server: Server = request.getfixturevalue(request.param)
    opened: list[Store] = []

    def open_there(port: int, seconds: float = 0.5) -> Store:
        url = redis_url(port) if request.param == "redis" else name_s3(monkeypatch, port)
        opened.append(open_store(url, seconds))
        return opened[-1]

    yield server.port, open_there
    for one in opened:
        one.close()
