"""``nvgemm-aot cache``: shows and clears the cache directory, and asks the remote cache."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.settings import REMOTE_CACHE_MODE_VARIABLE, REMOTE_CACHE_VARIABLE

from .terminal.printing import count_text, print_result, size_text, table
from .terminal.remote_texts import open_remote_cache, state_document, state_text
from .terminal.shared_options import Duration, cache_option, json_option

if TYPE_CHECKING:
    from ..jit.eviction import CachedBundle, CacheUsage

_AGE = Duration(
    "[0-9]{1,9}",
    {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400},
    "is not a number of at most 9 digits followed by s, m, h, d or w, e.g. 30d",
)

_cache_option = cache_option("Cache directory")


@click.group()
def cache() -> None:
    """Show or clear the cache: compiled kernels, plans, and user bundles of run-time compiling."""


@cache.command()
@_cache_option
def path(cache_dir: Path | None) -> None:
    """Print the cache directory."""
    click.echo(_cache_directory(cache_dir))


@cache.command(name="list")
@_cache_option
@json_option
def list_(cache_dir: Path | None, as_json: bool) -> None:
    """Show user bundles with their problems, and compiled kernels, with sizes and last use."""
    from ..jit.eviction import limit_bytes, read_usage
    from ..storage.build_cache import Cache

    document = usage_document(read_usage(Cache(_cache_directory(cache_dir))), limit_bytes())
    print_result(document, usage_text, as_json=as_json)


@cache.command()
@_cache_option
@click.option("--problem", "keys", multiple=True, help="Only this problem; may be repeated.")
@click.option(
    "--older-than",
    type=_AGE,
    metavar="AGE",
    help="Only content unused for at least this long, e.g. 30d (s, m, h, d, w).",
)
def clear(cache_dir: Path | None, keys: tuple[str, ...], older_than: float | None) -> None:
    """Remove everything, or what the options select; with both options, what both select."""
    from nvgemm_runtime.gemm.problem import Problem

    from ..jit.eviction import evict, read_usage, select_requested
    from ..storage.build_cache import Cache
    from ..storage.locks import remove_unused

    try:
        problems = frozenset(map(Problem.parse, keys))
    except ValueError as error:
        raise click.UsageError(
            f"--problem {', '.join(keys)}: {error}; nvgemm-aot cache list shows the keys"
        ) from None
    store = Cache(_cache_directory(cache_dir))
    before = read_usage(store)
    used_before = None if older_than is None else _now() - older_than
    chosen = select_requested(before, problems=problems, used_before=used_before)
    evict(store, chosen)
    remove_unused(store.lock_directory)
    remaining = [file for file in chosen.files if file.exists()]
    if remaining:
        raise StorageError(
            f"{remaining[0]}: cannot be removed, nor "
            f"{count_text(len(remaining) - 1, 'other file')}; check that you own them"
        )
    after = read_usage(store)
    problems_before, problems_after = (
        sum(len(bundle.problems) for bundle in usage.bundles) for usage in (before, after)
    )
    click.echo(
        f"{store.directory}: {size_text(before.size_bytes - after.size_bytes)} freed, "
        f"{count_text(problems_before - problems_after, 'problem')} and "
        f"{len(before.entries) - len(after.entries)} compiled kernels and plans removed; "
        f"{size_text(after.size_bytes)} left"
    )
    missing = problems - {k.problem for bundle in before.bundles for k in bundle.problems}
    for problem in sorted(missing):
        click.echo(f"no user bundle has {problem.key}", err=True)


@cache.command()
@json_option
def remote(as_json: bool) -> None:
    """Read the remote cache in $NVGEMM_AOT_REMOTE_CACHE, write it if builds would; show both.

    Exits with the status of a storage error if one fails.
    """
    with open_remote_cache() as store:
        if store is None:
            raise click.UsageError(
                f"no remote cache: set {REMOTE_CACHE_VARIABLE}, as to s3://bucket/prefix"
            )
        document = state_document(store)
    print_result(document, state_text, as_json=as_json)
    if not document["reachable"]:
        raise StorageError(
            f"the remote cache {document['address']} does not answer: {document['reason']}; start "
            f"it, or correct {REMOTE_CACHE_VARIABLE} and its credentials"
        )
    if document["unwritten"]:
        raise StorageError(
            f"the remote cache {document['address']} takes no entries: {document['unwritten']}; "
            "free space, correct the credentials' permissions, try again later, or only read "
            f"with {REMOTE_CACHE_MODE_VARIABLE}=read"
        )


def _now() -> float:
    return time.time()


def _cache_directory(option: Path | None) -> Path:
    from nvgemm_runtime.installed.jit_cache import default_directory

    directory = (option or default_directory()).absolute()
    if directory.exists() and not directory.is_dir():
        raise StorageError(
            f"{directory}: this is not a directory; set NVGEMM_AOT_CACHE to the cache directory"
        )
    return directory


def usage_document(usage: CacheUsage, limit_bytes: int) -> dict[str, Any]:
    """Describes a cache directory; times are ISO 8601 in UTC."""
    return {
        "directory": str(usage.directory),
        "size_bytes": usage.size_bytes,
        "limit_bytes": limit_bytes,
        "entries": len(usage.entries),
        "entries_bytes": sum(file.size_bytes for file in usage.entries),
        "bundles": [_bundle_document(bundle) for bundle in usage.bundles],
        "damaged": [{"path": str(file.path), "bytes": file.size_bytes} for file in usage.damaged],
    }


def _bundle_document(bundle: CachedBundle) -> dict[str, Any]:
    return {
        "path": str(bundle.file.path),
        "bytes": bundle.file.size_bytes,
        "target": bundle.target,
        "device": bundle.device,
        "kernels": bundle.kernels,
        "error": bundle.error,
        "problems": [
            {
                "problem": entry.problem.key,
                "kernels": len(entry.kernels),
                "bytes": sum(entry.kernels.values()),
                "last_used": _time_text(entry.used_at),
            }
            for entry in bundle.problems
        ],
    }


def usage_text(document: dict[str, Any]) -> str:
    """Renders a cache directory: one table per user bundle, then the sums."""
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
            f"{head}{bundle['target']} (device {bundle['device']}), "
            f"{count_text(bundle['kernels'], 'kernel')} for {count_text(len(rows), 'problem')}, "
            f"{size_text(bundle['bytes'])}\n"
            + table(rows, ["problem", "kernels", "size", "last used"])
        )
    parts += (
        f"{damaged['path']}: damaged, {size_text(damaged['bytes'])}"
        for damaged in document["damaged"]
    )
    parts.append(
        f"{document['directory']}: {size_text(document['size_bytes'])}, including "
        f"{document['entries']} compiled kernels and plans with "
        f"{size_text(document['entries_bytes'])}; the limit for run-time compiling is "
        f"{size_text(document['limit_bytes'])}"
    )
    return "\n\n".join(parts)


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(round(seconds), timezone.utc).isoformat()
