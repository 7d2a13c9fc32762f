"""`serving`'s table and the figures that its records keep."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.kernels import share_served
from benchmarks.serving.workload import Workload
from nvgemm_runtime.settings import Mode

Run = Mapping[str, Any]
"""One process' answer."""


class Start(str, enum.Enum):
    """Caches that a process begins with."""

    COLD = "cold"
    """Empty ones."""
    WARM = "warm"
    """Those that a process of the same mode has filled."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A figure's values in the processes of both modes.

    Attributes:
        name: Figure, such as ``decode, batch 16/rate``.
        unit: Unit.
        own, stock: Values with the plug-in on and off, one per process.
    """

    name: str
    unit: str
    own: tuple[float, ...]
    stock: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """Median over the stock median; None without both."""
        if not self.own or not self.stock or not statistics.median(self.stock):
            return None
        return statistics.median(self.own) / statistics.median(self.stock)

    @property
    def noise(self) -> float | None:
        """Half the range of either mode's values, as a share of its median; the larger one."""
        spreads = [
            (max(values) - min(values)) / 2 / statistics.median(values)
            for values in (self.own, self.stock)
            if len(values) > 1 and statistics.median(values)
        ]
        return max(spreads, default=None)


SHAPES = (("decode", "batch {}"), ("prefill", "{} tokens"))
"""Keys in a run, with the names of their sizes."""


def sides(record: Mapping[str, Any]) -> Iterator[Sides]:
    """Yields every figure that is compared between modes."""
    by_mode = {mode: of_mode(record, mode) for mode in (Mode.AUTO, Mode.OFF)}

    def of(name: str, unit: str, read: Any) -> Sides:
        values = {
            mode: tuple(float(one) for one in map(read, runs) if one is not None)
            for mode, runs in by_mode.items()
        }
        return Sides(name=name, unit=unit, own=values[Mode.AUTO], stock=values[Mode.OFF])

    for key, words in SHAPES:
        for size in _sizes(record, key):
            name = f"{key}, {words.format(size)}"
            yield of(
                f"{name}/rate",
                "tokens/s",
                lambda run, key=key, size=size: statistics.median(run[key][size]["rates"]),
            )
            yield of(
                f"{name}/kernels",
                "us",
                lambda run, key=key, size=size: _busy_us(run[key][size]),
            )
    for start in Start:
        yield of(
            f"start, {start.value}",
            "s",
            lambda run, start=start: run["seconds"]["start"] if run["start"] == start else None,
        )
    yield of("memory", "MB", lambda run: run["memory_mb"])
    for part in ("prefill", "decode"):
        yield of(
            f"log probabilities, {part}/rms difference from fp32",
            "nats",
            lambda run, part=part: run["accuracy"][part]["rms"],
        )


def served(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of GEMM time that bundled kernels take over, by size; medians."""
    found = {}
    for key, words in SHAPES:
        for size in _sizes(record, key):
            shares = [
                share
                for run in of_mode(record, Mode.AUTO)
                for one in run[key][size].get("kernels", ())
                if (share := share_served(one["kinds_us"])) is not None
            ]
            if shares:
                found[f"{key}, {words.format(size)}"] = statistics.median(shares)
    return found


def plugin_seconds(record: Mapping[str, Any]) -> dict[Start, float]:
    """Returns seconds of the start by the plug-in's own clock, by kind of start; medians."""
    found = {}
    for start in Start:
        seconds = [
            sum(run["stats"]["milliseconds"].values()) / 1e3
            for run in of_mode(record, Mode.AUTO)
            if run["start"] == start
        ]
        if seconds:
            found[start] = statistics.median(seconds)
    return found


def most_while_serving_ms(record: Mapping[str, Any]) -> float:
    """Returns the most milliseconds that the plug-in took in a process that had started."""
    runs = of_mode(record, Mode.AUTO)
    return max((float(run["stats"]["while_serving_ms"]) for run in runs), default=0.0)


def of_mode(record: Mapping[str, Any], mode: Mode) -> list[Run]:
    """Returns one mode's runs."""
    return [run for run in record["runs"] if run["mode"] == mode.value]


def distinct(record: Mapping[str, Any], mode: Mode, what: str) -> tuple[int, int]:
    """Returns how many digests a mode's processes have of something, and how many processes."""
    found = [run["digests"][what] for run in of_mode(record, mode)]
    return len(set(found)), len(found)


def table(record: Mapping[str, Any]) -> list[str]:
    """Returns a file's table, with its conditions, as lines."""
    runs: Sequence[Run] = record["runs"]
    workload = Workload.from_json(record["workload"])
    found = runs[0]["versions"]
    lines = [f"$ {one['command']}    # {one['date']}" for one in record["commands"]]
    names = (f"{name} {found[name]}" for name in ("driver", "torch", "CUDA", "nvgemm-aot"))
    lines.append(", ".join([found["device"], *names]))
    bundles = {
        bundle for run in of_mode(record, Mode.AUTO) for bundle in run["versions"]["bundles"]
    }
    lines += [f"  {bundle}" for bundle in sorted(bundles)]
    lines.append(
        f"{workload.engine} {found['engine']}, {workload.model} with random weights, "
        f"{workload.layers} layers; prompts of {workload.prompt} tokens, {workload.tokens} decoded"
    )
    settings = {
        "NVGEMM_AOT_FUSE=1": workload.is_fusing,
        "TORCHINDUCTOR_DETERMINISTIC=1": workload.is_deterministic,
    }
    lines += [f"with {name}" for name, is_set in settings.items() if is_set]
    counts = {mode: len(of_mode(record, mode)) for mode in (Mode.OFF, Mode.AUTO)}
    lines.append(
        ", ".join(f"{count} processes with {mode.value}" for mode, count in counts.items())
    )
    shares = served(record)
    lines.append(
        f"{'':<52} {'unit':<9} {'auto':>10} {'off':>10} {'auto/off':>9} {'noise':>7} {'served':>7}"
    )
    lines += [_row(one, shares.get(one.name.partition("/")[0])) for one in sides(record)]
    lines.append("medians over processes; noise: half the range of a mode's processes")
    lines += [
        f"plug-in's own clock, {start.value}: {seconds:.2f} s"
        for start, seconds in plugin_seconds(record).items()
    ]
    lines.append(f"and while serving at most {most_while_serving_ms(record):.0f} ms")
    lines += {line: None for run in runs for line in run["stats"].get("said", ())}
    for what in ("choices", "reductions", "tokens"):
        each = [
            f"{mode.value} {count} in {processes}"
            for mode in (Mode.OFF, Mode.AUTO)
            for count, processes in [distinct(record, mode, what)]
            if processes
        ]
        lines.append(f"different digests of {what}: {', '.join(each)} processes")
    lines += [
        f"kernel {name[:12]} was left to ATen: {reason}"
        for name, reason in {
            name: reason for run in runs for name, reason in run["stats"]["failed"].items()
        }.items()
    ]
    return lines


def _row(one: Sides, share: float | None) -> str:
    digits = 4 if one.unit == "nats" else 1
    values = (
        f"{statistics.median(side):,.{digits}f}" if side else "-" for side in (one.own, one.stock)
    )
    own, stock = values
    ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
    noise = "-" if one.noise is None else f"{100 * one.noise:.1f} %"
    part = f"{100 * share:.0f} %" if share is not None and one.name.endswith("/kernels") else ""
    return (
        f"{one.name:<52} {one.unit:<9} {own:>10} {stock:>10} {ratio:>9} {noise:>7} {part:>7}"
    ).rstrip()


def _sizes(record: Mapping[str, Any], key: str) -> list[str]:
    return list(record["runs"][0][key]) if record["runs"] else []


def _busy_us(row: Mapping[str, Any]) -> float | None:
    """Returns microseconds of a step in which kernels ran; None if they were not profiled."""
    found = [one["busy_us"] for one in row.get("kernels", ())]
    return statistics.median(found) if found else None
