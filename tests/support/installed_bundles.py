"""Which bundles the public functions of this process find."""

from __future__ import annotations

import importlib.metadata
import os
import zipfile
from pathlib import Path

import pytest

from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.installed import digest
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.launch import api, compiled, preload, select


def install_wheels(monkeypatch: pytest.MonkeyPatch, site: Path, *wheels: Path) -> None:
    """Unpack wheels into a directory, and make this process find their distributions alone."""
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.setattr(
        "nvgemm_runtime.installed.discover.distributions",
        lambda: importlib.metadata.distributions(path=[str(site)]),
    )


def id_of(built: BuiltBundle, served: Signature) -> str:
    """The id of the first kernel of a signature."""
    return next(one.id for one in built.header.kernels if one.signature == served)


def use(monkeypatch: pytest.MonkeyPatch, *places: Path) -> Installation:
    """Make this process find these bundles and no others."""
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", os.pathsep.join(map(str, places)))
    monkeypatch.setattr("nvgemm_runtime.installed.discover.distributions", lambda: ())
    installation = Installation()
    for module in (api, compiled, preload, select):
        monkeypatch.setattr(module, "INSTALLATION", installation)
    monkeypatch.setattr(select, "_cache", {})
    digest.forget()
    return installation
