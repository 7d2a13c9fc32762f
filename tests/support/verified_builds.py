"""Builds a manifest twice, and looks at what comes out."""

from __future__ import annotations

from pathlib import Path

from nvgemm_aot.manifest.parse import load_manifest
from nvgemm_aot.pipeline.pipeline import build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.verify.bundle import verify_bundle


def builds_verified_and_equal(text: str, tmp_path: Path) -> None:
    """Build a manifest of one target twice, and compare; then look at it."""
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    manifest = load_manifest(path)
    first, again = (
        build(manifest, tmp_path / name, Cache(tmp_path / f"cache-{name}"), jobs=jobs)
        for name, jobs in (("first", 1), ("again", 2))
    )
    file = first.bundles[0].path
    assert not first.bundles[0].failures
    assert file.read_bytes() == again.bundles[0].path.read_bytes()
    report = verify_bundle(file, disassemble=True)
    assert report.ok, report.findings
