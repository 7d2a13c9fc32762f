"""What tests of tuning share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuner import Tuner

from nvgemm_aot.bundle.content import BundleContent, read_content
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.reader import Bundle
from tuning_bench import DictatedTimer


@pytest.fixture
def tuner(tunable: Path, tuned_path: Path, dictated: DictatedTimer, kernel_cache: Cache) -> Tuner:
    return Tuner(tunable, tuned_path, dictated, kernel_cache)


@pytest.fixture
def content(tunable: Path) -> BundleContent:
    with Bundle(tunable) as bundle:
        return read_content(bundle)
