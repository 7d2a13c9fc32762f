"""Which bundles the public functions of this process find."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.launch import api, compiled, preload, select


def use(monkeypatch: pytest.MonkeyPatch, *places: Path) -> Installation:
    """Make this process find these bundles and no others."""
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", os.pathsep.join(map(str, places)))
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    installation = Installation()
    for module in (api, compiled, preload, select):
        monkeypatch.setattr(module, "INSTALLATION", installation)
    monkeypatch.setattr(select, "_chosen", {})
    return installation
