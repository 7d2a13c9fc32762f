"""``nvgemm-aot cache``: what is in the cache directory, and how to be rid of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import click

from nvgemm_runtime.errors import StorageError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A time span such as 30d."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,9})([smhdw])", value)
    if match is None:
        raise click.BadParameter(
            f"{value[:20]!r} is not a number of at most 9 digits followed by s, m, h, d or w, "
            "e.g. 30d"
        )
    return int(match[1]) * _UNITS[match[2]]


_directory_option = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Cache directory; default $NVGEMM_AOT_CACHE or the user's cache directory.",
)


@click.group()
def cache() -> None:
    """Show or clear the cache: compiled kernels, plans, and what torch.compile had compiled."""


@cache.command()
@_directory_option
def path(cache_dir: Path | None) -> None:
    """Print the cache directory."""
    click.echo(_directory(cache_dir))


@cache.command(name="list")
@_directory_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(cache_dir: Path | None, as_json: bool) -> None:
    """Show what is kept: user bundles with their problems, compiled kernels, sizes, last use."""
    from ..jit.cache_usage import look_at
    from ..jit.eviction import limit_bytes
    from ..storage.cache import Cache
    from .render_cache import usage_document, usage_text

    document = usage_document(look_at(Cache(_directory(cache_dir))), limit_bytes())
    click.echo(json.dumps(document, indent=2) if as_json else usage_text(document))


@cache.command()
@_directory_option
@click.option("--problem", "keys", multiple=True, help="Only this problem; may be repeated.")
@click.option(
    "--older-than",
    callback=_seconds,
    metavar="AGE",
    help="Only what was not used for so long, e.g. 30d (s, m, h, d, w).",
)
def clear(cache_dir: Path | None, keys: tuple[str, ...], older_than: int | None) -> None:
    """Remove what is kept: everything, or what the options say; with both, what both say."""
    from nvgemm_runtime.gemm.problem import Problem

    from ..jit.cache_usage import look_at
    from ..jit.eviction import evict, select
    from ..storage.cache import Cache
    from ..storage.locks import remove_unused
    from .tables import size_text

    try:
        problems = frozenset(map(Problem.parse, keys))
    except ValueError as error:
        raise click.UsageError(
            f"--problem {', '.join(keys)}: {error}; nvgemm-aot cache list shows the keys"
        ) from None
    store = Cache(_directory(cache_dir))
    before = look_at(store)
    used_before = None if older_than is None else _now() - older_than
    chosen = select(before, problems=problems, used_before=used_before)
    evict(store, chosen)
    remove_unused(store.lock_directory)
    left = [file for file in chosen.files if file.exists()]
    if left:
        raise StorageError(
            f"{left[0]}: cannot be removed, nor {len(left) - 1} other files; are they yours?"
        )
    after = look_at(store)
    kept = sum(len(bundle.problems) for bundle in after.bundles)
    click.echo(
        f"{store.directory}: {size_text(before.size_bytes - after.size_bytes)} freed, "
        f"{sum(len(bundle.problems) for bundle in before.bundles) - kept} problems and "
        f"{len(before.entries) - len(after.entries)} compiled kernels and plans removed; "
        f"{size_text(after.size_bytes)} left"
    )
    missing = problems - {k.problem for bundle in before.bundles for k in bundle.problems}
    for problem in sorted(missing):
        click.echo(f"no user bundle has {problem.key}", err=True)


def _now() -> float:
    return time.time()


def _directory(named: Path | None) -> Path:
    from nvgemm_runtime.installed.jit_cache import default_directory

    directory = (named or default_directory()).absolute()
    if directory.exists() and not directory.is_dir():
        raise StorageError(
            f"{directory}: this is no directory; set NVGEMM_AOT_CACHE to the cache directory"
        )
    return directory
