"""What tests of several files in this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_driver
from nvgemm_runtime.launch import native


@pytest.fixture
def loader(lib: native.Native) -> Iterator[Callable[[Any], None]]:
    """Sets the function that loads kernels by id."""
    yield lib.set_loader
    lib.set_loader(None)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a stand-in for the CUDA driver lies."""
    return fake_driver.build(tmp_path_factory.mktemp("driver"))
