"""What tests of several files in this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_driver import FakeDriver, fake_driver
from forked_scripts import ForkedScripts, forked_scripts
from nvgemm_runtime.launch.loading import native


@pytest.fixture
def loader(lib: native.Native) -> Iterator[Callable[[Any], None]]:
    """Sets the function that loads kernels by id."""
    yield lib.set_loader
    lib.set_loader(None)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    """Processes in which a stand-in for the CUDA driver is found."""
    with fake_driver(tmp_path_factory.mktemp("driver")) as driver:
        yield driver


@pytest.fixture(scope="session")
def scripts() -> Iterator[ForkedScripts]:
    """Processes that have imported torch, and loaded nothing of ours."""
    with forked_scripts("import torch, tvm_ffi") as scripts:
        yield scripts
