"""Ready-made kernel wheels: a manifest for every platform and CUDA version, by public commands."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_runtime.errors import ManifestError
from steps import read_module, run_module, stop

READY_MADE = (
    "deepseek-v3",
    "gpt-oss-120b",
    "gpt-oss-20b-experts",
    "llama-3.1-8b",
    "llama-3.1-8b-mxfp8",
    "llama-3.1-8b-nvfp4",
    "llama-3.3-70b",
    "mixtral-8x7b-experts",
    "qwen3-30b-a3b",
    "qwen3-30b-a3b-experts",
    "qwen3-32b",
    "qwen3-8b",
)
"""Manifests whose wheels a release has: those of models."""

EXAMPLES = ("hgemm-1000", "quickstart")
"""Manifests that come with the project, and have no wheel in a release."""

CUDAS = ("cu12", "cu13")
"""CUDA versions of targets."""


@dataclass(frozen=True, kw_only=True)
class KernelWheels:
    """What is built of one manifest.

    Attributes:
        manifest: The file.
        processors: Of each, one wheel is built.
        cudas: CUDA versions of the targets in each wheel.
    """

    manifest: Path
    processors: Sequence[str]
    cudas: Sequence[str]

    def build(self, output: Path, cache: Path | None = None) -> list[Path]:
        """Compile, verify and pack; returns the wheels.

        Kernels of all platforms are compiled by one command, which compiles device code that they
        share once. ``cache`` is used in place of the user's build cache.
        """
        declared = yaml.safe_load(self.manifest.read_text())
        declared["targets"] = expand_targets(declared["targets"], self.processors, self.cudas)
        with tempfile.TemporaryDirectory() as scratch:
            manifest = Path(scratch, self.manifest.name)
            manifest.write_text(yaml.safe_dump(declared, sort_keys=False))
            options = [] if cache is None else ["--cache-dir", cache]
            printed = read_module(
                "nvgemm_aot", "build", manifest, "--out", scratch, "--json", *options
            )
            bundles = bundles_by_platform(json.loads(printed), declared["targets"])
            for paths in bundles.values():
                read_module("nvgemm_aot", "verify", "--disassemble", *paths)
            return [
                wheel for paths in bundles.values() for wheel in self._pack(declared, paths, output)
            ]

    def _pack(self, declared: dict[str, Any], bundles: Sequence[Path], output: Path) -> list[Path]:
        """Packs bundles into a wheel, or into several if one is too large."""
        options = ["--name", declared["name"]]
        if "description" in declared:
            options += ["--summary", declared["description"]]
        with tempfile.TemporaryDirectory() as scratch:
            run_module("nvgemm_aot", "wheel", *bundles, "--out", scratch, *options)
            output.mkdir(parents=True, exist_ok=True)
            return [
                Path(shutil.move(wheel, output / wheel.name))
                for wheel in sorted(Path(scratch).glob("nvgemm_kernels_*.whl"))
            ]


def find(name: str, processors: Sequence[str], cudas: Sequence[str]) -> KernelWheels:
    """Finds the manifest that comes with the project, or the file, of wheels to build."""
    try:
        manifest = find_manifest(Path(name))
    except ManifestError as error:
        stop(str(error))
    return KernelWheels(manifest=manifest, processors=processors, cudas=cudas)


def expand_targets(
    targets: Iterable[str | dict[str, str]], processors: Sequence[str], cudas: Sequence[str]
) -> list[dict[str, str]]:
    """Every target of a manifest for every processor and CUDA version."""
    expanded = []
    for target in targets:
        entry = {"arch": target} if isinstance(target, str) else target
        for processor in processors:
            for cuda in cudas:
                row = {**entry, "platform": f"linux_{processor}", "cuda": cuda}
                if row not in expanded:
                    expanded.append(row)
    return expanded


def bundles_by_platform(
    built: dict[str, Any], targets: Sequence[dict[str, str]]
) -> dict[str, list[Path]]:
    """Bundles of a build by the platform that they are for; stops if a kernel may be missing.

    Args:
        built: What ``nvgemm-aot build --json`` printed.
        targets: Those that were asked for.
    """
    found = {bundle["target"]: bundle for bundle in built["bundles"]}
    bundles: dict[str, list[Path]] = {}
    for target in targets:
        key = f"{target['arch']}-{target['platform']}-{target['cuda']}"
        if key not in found:
            stop(f"no kernel was built for target {key}; nvgemm-aot build says why")
        if count := found[key]["incomplete"]:
            stop(f"{key}: {count} problems may get more kernels: compilers were killed; run again")
        bundles.setdefault(target["platform"], []).append(Path(found[key]["path"]))
    return bundles
