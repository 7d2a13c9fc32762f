"""Compares ways to compress a bundle's kernels.

Prints, for each scheme and number of kernels, a kernel's bytes in the file (with dictionaries,
without the header) and the time to decompress one kernel alone.

    python -m benchmarks.build.compression BUNDLE --kernels 24 --kernels 100 --kernels 400
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import zstandard

from benchmarks.record import Case
from benchmarks.shared.resuming import recording, records_option
from nvgemm_aot.bundle.compression import LEVEL, WORD_BYTES, compress, cover
from nvgemm_runtime.bundle.reader import Bundle


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Payload and its operator class."""

    family: str
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Group:
    """Kernels that share a dictionary: the stored dictionary and a frame per kernel."""

    kernels: list[Kernel]
    dictionary: bytes
    stored: bytes
    frames: list[bytes]


Scheme = Callable[[list[Kernel]], list[Group]]


def read_kernels(path: Path) -> list[Kernel]:
    with Bundle(path) as bundle:
        return [
            Kernel(family=kernel.operator.split("_")[0], data=bundle.payload(kernel))
            for kernel in bundle.header.kernels
        ]


def first(payloads: Sequence[bytes], count: int) -> list[int]:
    return list(range(min(count, len(payloads))))


def even(payloads: Sequence[bytes], count: int) -> list[int]:
    count = min(count, len(payloads))
    return [(2 * i + 1) * len(payloads) // (2 * count) for i in range(count)]


def load(content: bytes, trained: bool) -> zstandard.ZstdCompressionDict | None:
    kind = zstandard.DICT_TYPE_FULLDICT if trained else zstandard.DICT_TYPE_RAWCONTENT
    return zstandard.ZstdCompressionDict(content, dict_type=kind) if content else None


def pack(
    kernels: list[Kernel], content: bytes, *, level: int = LEVEL, trained: bool = False
) -> Group:
    compressor = zstandard.ZstdCompressor(
        level=level, dict_data=load(content, trained), write_checksum=False, write_dict_id=False
    )
    frames = [compressor.compress(kernel.data) for kernel in kernels]
    alone = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    stored = alone.compress(content) if content else b""
    return Group(kernels=kernels, dictionary=content, stored=stored, frames=frames)


def product(kernels: list[Kernel]) -> list[Group]:
    """Scheme that bundles use."""
    packed = compress([kernel.data for kernel in kernels])
    return [
        Group(
            kernels=kernels,
            dictionary=packed.dictionary,
            stored=packed.dictionary_frame,
            frames=packed.frames,
        )
    ]


def whole(choose: Callable[[Sequence[bytes], int], list[int]], count: int) -> Scheme:
    """Uses a dictionary made from whole kernels."""

    def scheme(kernels: list[Kernel]) -> list[Group]:
        picked = choose([kernel.data for kernel in kernels], count)
        return [pack(kernels, b"".join(kernels[index].data for index in picked))]

    return scheme


def trained(size: int) -> Scheme:
    def scheme(kernels: list[Kernel]) -> list[Group]:
        dictionary = zstandard.train_dictionary(size, [k.data for k in kernels], level=LEVEL)
        return [pack(kernels, dictionary.as_bytes(), trained=True)]

    return scheme


def per_family(members: int) -> Scheme:
    """Uses a dictionary per operator class."""

    def scheme(kernels: list[Kernel]) -> list[Group]:
        families: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            families[kernel.family].append(kernel)
        return [
            group
            for _, family in sorted(families.items())
            for group in whole(cover, max(1, members * len(family) // len(kernels)))(family)
        ]

    return scheme


def nearest(roots: int) -> Scheme:
    """Stores each kernel as a difference from the root with which it shares most words."""

    def scheme(kernels: list[Kernel]) -> list[Group]:
        chosen = cover([kernel.data for kernel in kernels], roots)
        words = [
            {k.data[at : at + WORD_BYTES] for at in range(0, len(k.data), WORD_BYTES)}
            for k in kernels
        ]
        groups: dict[int, list[Kernel]] = defaultdict(list)
        for index, kernel in enumerate(kernels):
            best = max(chosen, key=lambda root: (len(words[root] & words[index]), -root))
            groups[best].append(kernel)
        return [pack(group, kernels[root].data) for root, group in sorted(groups.items())]

    return scheme


def schemes(total: int) -> dict[str, Scheme]:
    table: dict[str, Scheme] = {
        "no dictionary, zstd-19": lambda kernels: [pack(kernels, b"")],
        "no dictionary, zstd-22": lambda kernels: [pack(kernels, b"", level=22)],
    }
    table |= {f"trained, {kib} KiB": trained(kib << 10) for kib in (64, 112, 256)}
    for count in (8, 32, 64, 128):
        if count < total:
            table[f"first {count} kernels"] = whole(first, count)
            table[f"every so many, {count}"] = whole(even, count)
            table[f"covering {count}"] = whole(cover, count)
    table["one each class, 64 in all"] = per_family(64)
    table |= {f"nearest of {count}": nearest(count) for count in (8, 64) if count < total}
    table["all kernels"] = whole(cover, total)
    table["as bundles do it"] = product
    return table


def decompress_ms(groups: list[Group], is_trained: bool) -> float:
    """Returns the median time to decompress a kernel; checks every kernel."""
    times: list[float] = []
    for group in groups:
        dictionary = load(group.dictionary, is_trained)
        decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)
        for kernel, frame in zip(group.kernels, group.frames):
            start = time.perf_counter()
            output = decompressor.decompress(frame)
            times.append(time.perf_counter() - start)
            if output != kernel.data:
                raise click.ClickException("a kernel did not survive its round trip")
    return statistics.median(times) * 1e3


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kernels", "sizes", multiple=True, type=click.IntRange(2), default=(24, 100, 400))
@click.option("--seed", default=1, show_default=True, help="Picks the kernels.")
@records_option
def main(bundle: Path, sizes: tuple[int, ...], seed: int, records_path: Path | None) -> None:
    with recording(records_path, "build.compression", {}) as cases:
        compare(bundle, sizes, seed, cases)


def compare(bundle: Path, sizes: tuple[int, ...], seed: int, cases: list[Case]) -> None:
    """Prints the table and adds its cases."""
    everything = read_kernels(bundle)
    click.echo("| scheme | kernels | bytes a kernel | dictionary, stored | raw | ms | s |")
    click.echo("|---|--:|--:|--:|--:|--:|--:|")
    for size in sorted({min(size, len(everything)) for size in sizes}):
        picked = sorted(random.Random(seed).sample(range(len(everything)), size))
        kernels = [everything[index] for index in picked]
        for name, scheme in schemes(size).items():
            start = time.perf_counter()
            try:
                groups = scheme(kernels)
            except zstandard.ZstdError as error:  # training refuses too few samples
                click.echo(f"| {name} | {size} | {error} | | | | |")
                continue
            seconds = time.perf_counter() - start
            stored = sum(len(group.stored) for group in groups)
            raw = sum(len(group.dictionary) for group in groups)
            total = stored + sum(len(frame) for group in groups for frame in group.frames)
            cases.append(
                Case(name=f"{size} kernels/{name}", figure=total / size, unit="bytes a kernel")
            )
            click.echo(
                f"| {name} | {size} | {total / size:.0f} | {stored} | {raw} "
                f"| {decompress_ms(groups, name.startswith('trained')):.4f} | {seconds:.1f} |"
            )


if __name__ == "__main__":
    main()
