"""What tests of the native part share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_driver import FakeDriver, fake_driver


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    """Processes in which a stand-in for the CUDA driver is found."""
    with fake_driver(tmp_path_factory.mktemp("driver")) as driver:
        yield driver
