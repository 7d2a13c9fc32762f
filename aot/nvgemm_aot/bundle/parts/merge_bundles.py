"""Merges bundles of one target and toolchain into one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime.bundle.format import PREFIX, Header, Whole, sha256_hex
from nvgemm_runtime.errors import BundleFormatError, PackagingError
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installed.policy_checks import open_checked

from ..compression import Packed
from ..content import BundleContent
from ..writer import encode_bundle
from .build_keys import with_own_key
from .copied_frames import OpenedBundle, as_is, open_whole, pack_by_copying
from .join_contents import JoinRankings, difference, join_contents

SPLIT = "the bundle that was split"
"""Name of the bundle whose parts were merged."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A merged bundle, not yet written.

    Attributes:
        data: Its bytes.
        header: Its header.
        contents: The contents it was merged from.
        content: Its own content.
        equals: Name of the bundle that it equals to the byte, `SPLIT` for the one whose parts were
            merged; None if it is a new one.
    """

    data: bytes
    header: Header
    contents: Sequence[BundleContent]
    content: BundleContent
    equals: str | None

    @property
    def left_out(self) -> list[str]:
        """Ids of kernels that a merged bundle has and the result has not, sorted."""
        kept = {kernel.id for kernel in self.content.kernels}
        return sorted({k.id for content in self.contents for k in content.kernels} - kept)


def merge_bundles(
    paths: Sequence[Path], join_for: Callable[[Target], JoinRankings], *, generator: str
) -> Merged:
    """Merges bundles; their order changes nothing.

    The result gets a build key that depends on its bytes alone, unless it is the bundle that
    `split_bundle` made all the parts from, or equals one of the merged bundles: then it is that
    bundle, to the byte.

    Args:
        paths: Bundle files; a file named twice counts once.
        join_for: Returns what joins a problem's rankings for a target; the result must not depend
            on their order.
        generator: Program and version that merges, for bundles that several programs made.

    Raises:
        PackagingError: If the bundles differ in target or toolchain, or contradict each other.
        BundleFormatError: If a bundle is damaged or has entries unknown to this release, or the
            result breaks a rule of the format.
        SignatureError: If the policy refuses a bundle.
        StorageError: If a file cannot be read.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for path in dict.fromkeys(paths):
            opened.append(open_whole(stack.enter_context(open_checked(path))))
    different = difference(
        [(one.bundle.path, one.content) for one in opened],
        {"target": "target", "toolchain": "toolchain"},
    )
    if different is not None:
        raise PackagingError(
            f"{different}; merge bundles of one target and one toolchain, and keep others apart"
        )
    contents = [one.content for one in opened]
    first = opened[0]
    if all(one.data == first.data for one in opened):
        return Merged(
            data=first.data,
            header=first.header,
            contents=contents,
            content=first.content,
            equals=str(first.bundle.path),
        )
    try:
        joined = join_contents(contents, join_for(first.content.target))
        generators = {content.generator for content in contents}
        if len(generators) > 1:
            joined = replace(joined, generator=generator)
        packed = pack_by_copying(opened, joined, are_parts=bool(_common_wholes(opened)))
        return _encode(joined, packed, opened)
    except ValueError as error:
        names = ", ".join(str(one.bundle.path) for one in opened)
        raise PackagingError(f"{names}: {error}; build them again from one manifest") from error


def _encode(joined: BundleContent, packed: Packed, opened: Sequence[OpenedBundle]) -> Merged:
    contents = [one.content for one in opened]
    for candidate, whole, name in _candidates(joined, opened):
        with contextlib.suppress(BundleFormatError):
            data, header = encode_bundle(candidate, as_is(packed))
            if sha256_hex(data[: PREFIX.size]) == whole.prefix_sha256:
                return Merged(
                    data=data, header=header, contents=contents, content=candidate, equals=name
                )
    inputs = {one.whole for one in opened}
    wholes = tuple(whole for whole in _common_wholes(opened) if whole not in inputs)
    joined = with_own_key(replace(joined, part_of=wholes), packed)
    data, header = encode_bundle(joined, as_is(packed))
    return Merged(data=data, header=header, contents=contents, content=joined, equals=None)


def _candidates(
    joined: BundleContent, opened: Sequence[OpenedBundle]
) -> Iterator[tuple[BundleContent, Whole, str]]:
    """Yields bundles that the result may be, each with its identity and name."""
    sizes = len(joined.kernels), len(joined.rankings), len(joined.unserved)
    for one in sorted(opened, key=lambda one: one.data[: PREFIX.size]):
        header = one.header
        if (len(header.kernels), len(header.rankings), len(header.unserved)) == sizes:
            yield (
                replace(
                    joined,
                    build_key=header.build_key,
                    generator=header.generator,
                    part_of=header.part_of,
                ),
                one.whole,
                str(one.bundle.path),
            )
    common = _common_wholes(opened)
    for position, whole in enumerate(common):
        rest = common[position + 1 :]
        yield replace(joined, build_key=whole.build_key, part_of=rest), whole, SPLIT


def _common_wholes(opened: Sequence[OpenedBundle]) -> tuple[Whole, ...]:
    """Returns the bundles that all of these are, or are parts of, the smallest first."""
    first, *others = [(one.whole, *one.header.part_of) for one in opened]
    return tuple(whole for whole in first if all(whole in chain for chain in others))
