"""What ``nvgemm-aot cache list`` prints."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ..jit.cache_usage import CacheUsage, KeptBundle
from .tables import size_text, table


def usage_document(usage: CacheUsage, limit_bytes: int) -> dict[str, Any]:
    """Describe a cache directory; times are ISO 8601 in UTC."""
    return {
        "directory": str(usage.directory),
        "size_bytes": usage.size_bytes,
        "limit_bytes": limit_bytes,
        "entries": len(usage.entries),
        "entries_bytes": sum(file.size_bytes for file in usage.entries),
        "bundles": [_bundle_document(bundle) for bundle in usage.bundles],
        "damaged": [{"path": str(file.path), "bytes": file.size_bytes} for file in usage.damaged],
    }


def _bundle_document(bundle: KeptBundle) -> dict[str, Any]:
    return {
        "path": str(bundle.file.path),
        "bytes": bundle.file.size_bytes,
        "target": bundle.target,
        "device": bundle.device,
        "kernels": bundle.kernels,
        "error": bundle.error,
        "problems": [
            {
                "problem": kept.problem.key,
                "kernels": len(kept.kernels),
                "bytes": sum(kept.kernels.values()),
                "last_used": _time_text(kept.used_at),
            }
            for kept in bundle.problems
        ],
    }


def usage_text(document: dict[str, Any]) -> str:
    """Print a cache directory: a table a user bundle, then the sums."""
    parts = []
    for bundle in document["bundles"]:
        head = f"{bundle['path']}: "
        if bundle["error"] is not None:
            parts.append(f"{head}{bundle['error']}")
            continue
        rows = [
            [p["problem"], p["kernels"], size_text(p["bytes"]), p["last_used"]]
            for p in bundle["problems"]
        ]
        parts.append(
            f"{head}{bundle['target']} (device {bundle['device']}), {bundle['kernels']} kernels "
            f"for {len(rows)} problems, {size_text(bundle['bytes'])}\n"
            + table(rows, ["problem", "kernels", "size", "last used"])
        )
    parts += (
        f"{damaged['path']}: damaged, {size_text(damaged['bytes'])}"
        for damaged in document["damaged"]
    )
    parts.append(
        f"{document['directory']}: {size_text(document['size_bytes'])}, of them "
        f"{document['entries']} compiled kernels and plans with "
        f"{size_text(document['entries_bytes'])}; the limit of run-time compiling is "
        f"{size_text(document['limit_bytes'])}"
    )
    return "\n\n".join(parts)


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(round(seconds), timezone.utc).isoformat()
