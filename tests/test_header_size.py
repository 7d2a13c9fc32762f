"""Plans whose bundle no reader would take are refused before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

import cpu_provider
from nvgemm_aot import header_size
from nvgemm_aot.bundle import encode_bundle
from nvgemm_aot.cache import Cache
from nvgemm_aot.contents import make_contents
from nvgemm_aot.header_size import planned_header_bytes
from nvgemm_aot.pipeline import build, plan_build
from nvgemm_runtime.errors import ManifestError
from nvgemm_runtime.format import PREFIX

PROBLEMS = [cpu_provider.problem(sizes=(m, 32, 64)) for m in range(1, 60)]
