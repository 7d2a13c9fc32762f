"""Compare ways to compress the kernels of one bundle.

Reads every ``*.so`` of a directory (linked kernels of one target) and prints, for
each scheme and bundle size, what one kernel costs in the file, everything included,
and how long one kernel takes to come back out.

    python compression.py /path/to/so/100f --kernels 24 --kernels 100 --kernels 400

A ``<name>.json`` beside a kernel may hold ``cls``, ``operator`` and ``sha256``; they
give the order a bundle would have and the families. Without it the file name serves.
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import zstandard

TRAINED_MAGIC = b"\x37\xa4\x30\xec"
WORD = 16  # bytes of one SASS instruction; payloads are compared by aligned words
MAX_MEMBERS = 64  # kernels in a dictionary: 64 are about 4 MB, loaded in about 3.5 ms


@dataclass(frozen=True)
class Kernel:
    name: str
    family: str
    data: bytes


@dataclass(frozen=True)
class Group:
    """Kernels that share a dictionary: the dictionary, as stored, and a frame a kernel."""

    kernels: list[Kernel]
    dictionary: bytes
    stored: bytes
    frames: list[bytes]


Scheme = Callable[[list[Kernel]], list[Group]]


def read_kernels(directory: Path) -> list[Kernel]:
    """All kernels of the directory, in the order a bundle would list them."""
    found: list[tuple[tuple[str, str, str], Kernel]] = []
    for path in sorted(directory.glob("*.so")):
        sidecar = path.with_suffix(".json")
        meta: dict[str, str] = json.loads(sidecar.read_text()) if sidecar.exists() else {}
        family = meta.get("cls", "")
        kernel = Kernel(path.stem, family, path.read_bytes())
        found.append(((family, meta.get("operator", ""), meta.get("sha256", path.stem)), kernel))
    return [kernel for _, kernel in sorted(found, key=lambda item: item[0])]


# --- choosing what goes into a dictionary -----------------------------------------


def first(kernels: Sequence[Kernel], count: int) -> list[int]:
    return list(range(min(count, len(kernels))))


def even(kernels: Sequence[Kernel], count: int) -> list[int]:
    count = min(count, len(kernels))
    return [(2 * i + 1) * len(kernels) // (2 * count) for i in range(count)]


def cover(kernels: Sequence[Kernel], count: int) -> list[int]:
    """Greedy maximum coverage.

    A kernel holds a set of aligned 16-byte words, and a word is worth the number of
    other kernels that hold it too. Take the kernel that adds the most worth, then the
    one that adds the most to that, and so on. Gains only shrink, so a stale heap entry
    is an upper bound and re-evaluating the top is enough. Ties go to the lower index.
    """
    words = [
        {k.data[at : at + WORD] for at in range(0, len(k.data) - WORD + 1, WORD)} for k in kernels
    ]
    holders: Counter[bytes] = Counter()
    for held in words:
        holders.update(held)
    shared = [{word for word in held if holders[word] > 1} for held in words]
    heap = [(-sum(holders[w] - 1 for w in held), i) for i, held in enumerate(shared)]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and len(chosen) < count:
        _, index = heapq.heappop(heap)
        shared[index] = {word for word in shared[index] if holders[word]}
        entry = (-sum(holders[w] - 1 for w in shared[index]), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        chosen.append(index)
        for word in shared[index]:
            holders[word] = 0  # covered: worth nothing to whoever comes later
    return chosen


def members(total: int) -> int:
    """Two thirds of a small bundle's kernels, at most MAX_MEMBERS."""
    return min(MAX_MEMBERS, -(-2 * total // 3))


def load_dictionary(content: bytes) -> zstandard.ZstdCompressionDict | None:
    """Only what zstd's trainer made has a header; whole kernels are raw content."""
    raw, full = zstandard.DICT_TYPE_RAWCONTENT, zstandard.DICT_TYPE_FULLDICT
    kind = full if content.startswith(TRAINED_MAGIC) else raw
    return zstandard.ZstdCompressionDict(content, dict_type=kind) if content else None


def pack(kernels: list[Kernel], content: bytes, level: int = 19) -> Group:
    dictionary = load_dictionary(content)
    compressor = zstandard.ZstdCompressor(
        level=level, dict_data=dictionary, write_checksum=False, write_dict_id=False
    )
    frames = [compressor.compress(kernel.data) for kernel in kernels]
    plain = zstandard.ZstdCompressor(level=19, write_checksum=False)
    return Group(kernels, content, plain.compress(content) if content else b"", frames)


def independent(level: int) -> Scheme:
    return lambda kernels: [pack(kernels, b"", level)]


def whole_kernels(
    choose: Callable[[Sequence[Kernel], int], list[int]], count: int | None, level: int = 19
) -> Scheme:
    """A raw-content dictionary of chosen kernels, the most valuable one last (nearest)."""

    def scheme(kernels: list[Kernel]) -> list[Group]:
        picked = choose(kernels, members(len(kernels)) if count is None else count)
        content = b"".join(kernels[i].data for i in reversed(picked))
        return [pack(kernels, content, level)]

    return scheme


def per_family(kernels: list[Kernel]) -> list[Group]:
    """One dictionary an operator class, the members shared out by its kernels."""
    families: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        families[kernel.family].append(kernel)
    groups: list[Group] = []
    for _, group in sorted(families.items()):
        count = max(1, round(members(len(kernels)) * len(group) / len(kernels)))
        groups += whole_kernels(cover, count)(group)
    return groups


def nearest_root(count: int) -> Scheme:
    """Every kernel as a delta to the one root it shares most words with; no chains."""

    def scheme(kernels: list[Kernel]) -> list[Group]:
        roots = cover(kernels, count)
        words = [{k.data[a : a + WORD] for a in range(0, len(k.data), WORD)} for k in kernels]
        groups: dict[int, list[Kernel]] = defaultdict(list)
        for i, kernel in enumerate(kernels):
            groups[max(roots, key=lambda root: (len(words[root] & words[i]), -root))].append(kernel)
        return [pack(group, kernels[root].data) for root, group in sorted(groups.items())]

    return scheme


def trained(size: int) -> Scheme:
    def scheme(kernels: list[Kernel]) -> list[Group]:
        dictionary = zstandard.train_dictionary(size, [k.data for k in kernels], level=19)
        return [pack(kernels, dictionary.as_bytes())]

    return scheme


def schemes(total: int) -> dict[str, Scheme]:
    table: dict[str, Scheme] = {"zstd-19": independent(19), "zstd-22": independent(22)}
    table |= {f"trained {kib} KiB": trained(kib << 10) for kib in (64, 112, 256)}
    counts = [count for count in (2, 4, 8, 16, 32, 64, 128) if count < total]
    table |= {f"first {count}": whole_kernels(first, count) for count in counts[2:5]}
    table |= {f"even {count}": whole_kernels(even, count) for count in counts}
    table |= {f"cover {count}": whole_kernels(cover, count) for count in counts}
    table["cover all (solid)"] = whole_kernels(cover, total)
    table["cover, a family each"] = per_family
    table |= {f"nearest of {count}": nearest_root(count) for count in counts[2:5]}
    return table | {f"cover auto, zstd-{n}": whole_kernels(cover, None, n) for n in (9, 15, 19, 22)}


# --- measuring ---------------------------------------------------------------------


def decompress_ms(groups: list[Group], limit: int = 200) -> float:
    """Median time of one kernel, its dictionary loaded; checks every kernel it reads."""
    times: list[float] = []
    for group in groups:
        data = group.dictionary
        if data and zstandard.decompress(group.stored) != data:
            raise click.ClickException("a dictionary did not survive its round trip")
        decompressor = zstandard.ZstdDecompressor(dict_data=load_dictionary(data))
        share = -(-limit // len(groups))
        for kernel, frame in list(zip(group.kernels, group.frames, strict=True))[:share]:
            start = time.perf_counter()
            output = decompressor.decompress(frame)
            times.append(time.perf_counter() - start)
            if output != kernel.data:
                raise click.ClickException(f"{kernel.name} did not survive its round trip")
    return statistics.median(times) * 1e3


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--kernels", "sizes", multiple=True, type=click.IntRange(1), default=(24, 100, 400))
@click.option("--seed", default=1, show_default=True, help="Picks the kernels of a bundle.")
@click.option("--only", default="", help="Run schemes whose name contains this.")
def main(directory: Path, sizes: tuple[int, ...], seed: int, only: str) -> None:
    everything = read_kernels(directory)
    if not everything:
        raise click.ClickException(f"no *.so in {directory}")
    head = "| scheme | kernels | bytes a kernel | dictionary stored | dictionary raw | ms | s |"
    click.echo(head + "\n|---|--:|--:|--:|--:|--:|--:|")
    for size in sorted({min(size, len(everything)) for size in sizes}):
        picked = sorted(random.Random(seed).sample(range(len(everything)), size))
        kernels = [everything[i] for i in picked]
        for name, scheme in schemes(size).items():
            if only not in name:
                continue
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
            click.echo(
                f"| {name} | {size} | {total / size:.0f} | {stored} | {raw} "
                f"| {decompress_ms(groups):.4f} | {seconds:.1f} |"
            )


if __name__ == "__main__":
    main()
