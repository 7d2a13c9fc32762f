"""``nvgemm-aot tune``."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX

from .interrupts import INTERRUPTED
from .progress import report_progress

_ANY_PATH = click.Path(path_type=Path)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class _Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, from a text such as 90s, 10m or 1.5h."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", str(value))
        if match is None:
            self.fail(f"{value!r} is no duration such as 90s, 10m or 1.5h", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Have SIGTERM, by which jobs end at their time limit, end a run as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@click.argument("bundles", type=_ANY_PATH, nargs=-1, required=True)
@click.option("-o", "--out", type=_ANY_PATH, required=True, help="The bundle to write.")
@click.option("--budget", type=_Duration(), help="Begin no problem after this, e.g. 90s, 10m.")
@click.option(
    "--all-kernels",
    is_flag=True,
    help="Measure each problem with all kernels of its signature, not only those ranked for it.",
)
@click.option("--triton", is_flag=True, help="Also ask Inductor for its best Triton kernel.")
@click.option("--prune", is_flag=True, help="Drop kernels that are never among the first two.")
@click.option(
    "--accept-suspect",
    is_flag=True,
    help="Write the bundle even if all kernels of a signature, or most of all, came out wrong.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def tune(
    ctx: click.Context,
    bundles: tuple[Path, ...],
    out: Path,
    budget: float | None,
    all_kernels: bool,
    triton: bool,
    prune: bool,
    accept_suspect: bool,
    as_json: bool,
) -> None:
    """Measure the kernels of BUNDLES on this GPU, and write a bundle with what was measured.

    Every declared problem is timed with its kernels and with ATen. What was measured is kept beside
    the output, in OUT.tuning.jsonl: the same command goes on from there.
    """
    from ..tuning.bench import gpu_bench
    from ..tuning.state import state_path
    from ..tuning.tune import Options
    from ..tuning.tune import tune as measure_and_write
    from .render_tune import tuned_document, tuned_text

    if out.suffix != BUNDLE_SUFFIX:
        raise click.UsageError(f"{out}: a bundle is named NAME{BUNDLE_SUFFIX}")
    if out.resolve() in [path.resolve() for path in bundles]:
        raise click.UsageError(f"{out} is among the bundles to tune; name another output")
    options = Options(
        budget_s=budget,
        all_kernels=all_kernels,
        triton=triton,
        prunes=prune,
        accepts_suspect=accept_suspect,
    )
    try:
        with _sigterm_interrupts(), report_progress("Measuring", "problems") as progress:
            tuned = measure_and_write(bundles, out, gpu_bench(), options, progress=progress)
    except KeyboardInterrupt:
        kept = "nothing was measured yet"
        if state_path(out).exists():
            kept = f"what was measured is in {state_path(out)}"
        click.echo(f"nvgemm-aot: interrupted; {kept}, and the same command goes on", err=True)
        ctx.exit(INTERRUPTED)
    document = tuned_document(tuned)
    click.echo(json.dumps(document, indent=2) if as_json else tuned_text(document))
