"""What tests of tuning share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuner import Tuner

from nvgemm_aot.storage.build_cache import Cache
from tuning_bench import DictatedTimer


@pytest.fixture
def tuner(tunable: Path, tuned_path: Path, dictated: DictatedTimer, kernel_cache: Cache) -> Tuner:
    return Tuner(tunable, tuned_path, dictated, kernel_cache)
