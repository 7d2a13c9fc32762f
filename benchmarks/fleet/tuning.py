"""Measures `tune` on one GPU and on several, with the same bundle.

    python -m benchmarks.fleet.tuning BUNDLE --gpus 0,1 [--confirm 2] [--json results.json]

Each tuning is a process of its own, into a new output, without second measurements. *Start-up* is
the time until the first problem begins on every GPU; *measuring* is the rest until the last one
ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

TUNE = """
import json, sys, time
from pathlib import Path
from nvgemm_aot.tuning.spread.several_gpus import tune_on
from nvgemm_aot.tuning.tune_bundles import TuningOptions
from nvgemm_aot.tuning.watchdog import tune_watched

bundle, output, gpus, options = json.loads(sys.argv[1])
calls = []
begin = time.monotonic()
common = dict(progress=lambda done, total: calls.append((time.monotonic() - begin, done, total)))
arguments = [Path(bundle)], Path(output), TuningOptions(repeats=False, **options)
if len(gpus) > 1:
    tuned = tune_on(gpus, *arguments, **common)
else:
    tuned = tune_watched(*arguments, gpu=gpus[0], **common)
print(json.dumps({
    "seconds": time.monotonic() - begin, "calls": calls, "problems": len(tuned.outcomes),
    "standings": [r.measured.standing for r in tuned.header.rankings if r.measured is not None],
}))
"""


def _tune(
    bundle: Path, gpus: list[str], options: dict[str, Any], directory: Path
) -> dict[str, Any]:
    output = directory / f"{'-'.join(gpus)}-{time.monotonic_ns()}.nvgemm"
    arguments = json.dumps([str(bundle), str(output), gpus, options])
    done = subprocess.run(
        [sys.executable, "-c", TUNE, arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise click.ClickException(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    calls = result.pop("calls")
    result["start-up"] = calls[0][0]
    result["measuring"] = next(at for at, done, total in calls if done == total) - calls[0][0]
    result["measured before"] = calls[0][1]
    return {"gpus": len(gpus), **options, **result}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--gpus", default="0,1", show_default=True, help="GPUs, as CUDA_VISIBLE_DEVICES has.")
@click.option("--confirm", type=int, help="Also measure each problem on so many GPUs.")
@click.option("--rounds", default=2, show_default=True, help="Tunings of each kind, in turns.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="File for the results.")
def main(bundle: Path, gpus: str, confirm: int | None, rounds: int, output: Path | None) -> None:
    """Measures BUNDLE on one of the GPUs, then on all at once."""
    names = gpus.split(",")
    kinds: list[tuple[list[str], dict[str, Any]]] = [(names[:1], {}), (names, {})]
    if confirm:
        kinds.append((names, {"confirms": confirm}))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            for chosen, options in kinds:
                rows.append(_tune(bundle, chosen, options, Path(directory)))
                row = rows[-1]
                print(
                    f"{row['gpus']} GPUs{' confirmed by ' + str(confirm) if options else ''}: "
                    f"{row['problems']} problems, start-up {row['start-up']:.1f} s, measuring "
                    f"{row['measuring']:.1f} s, in all {row['seconds']:.1f} s",
                    flush=True,
                )
    one, all_ = (
        min(row["measuring"] for row in rows if row["gpus"] == count and "confirms" not in row)
        for count in (1, len(names))
    )
    print(f"measuring on {len(names)} GPUs: {one / all_:.2f} times as fast as on one")
    if output:
        output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
