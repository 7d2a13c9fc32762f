"""Packs bundles into one wheel, or into several that require each other if one is too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import PackagingError
from nvgemm_runtime.installed.signatures import SIGNATURE_SUFFIX

from ..storage.private_key import SigningKey
from .confirmed_contents import ConfirmedContent, confirmed_contents
from .packed_signatures import part_signatures
from .parts.copied_frames import open_whole
from .parts.split_bundle import Part, split_below
from .wheel import PackedBundle, Parts, encode_wheel, read_bundles
from .wheel_names import WheelIdentity, identify, platform_tag

MAX_WHEEL_BYTES = 95 << 20
"""Largest wheel, in bytes. The public index takes files up to 100 MB unless a project asks for
more; 95 MiB (99.6 MB) is below that by either meaning of the unit."""

_MOST_TRIES = 8
"""Most divisions that are tried to meet `MAX_WHEEL_BYTES`."""

Contents = Mapping[str, PackedBundle]
"""A wheel's bundles by target."""


@dataclass(frozen=True, kw_only=True)
class EncodedWheel:
    """A wheel, not yet written.

    Attributes:
        filename: File name.
        data: Its bytes.
        number: Its number among the wheels that require each other, from 1.
        count: Number of these wheels.
    """

    filename: str
    data: bytes
    number: int
    count: int


def encode_wheels(
    bundles: Sequence[Path],
    *,
    name: str,
    version: str,
    summary: str | None = None,
    confirmed: Sequence[Path] = (),
    key: SigningKey | None = None,
) -> list[EncodedWheel]:
    """Packs bundles, one per target, into wheels; equal bundles in any order give equal bytes.

    One wheel holds all bundles if it has at most `MAX_WHEEL_BYTES`. Otherwise each target gets a
    wheel, or several, with a part of its bundle in each. If a target's bundles are parts of one
    already, each gets a wheel. The first wheel has the name and requires the others,
    ``NAME-part2`` and so on, in exactly this version; they require the first.

    Args:
        bundles: Bundle files.
        name: Suffix of the distribution's name after ``nvgemm-kernels-``; normalised.
        version: The wheels' version; normalised.
        summary: One line about the wheels; by default derived from the bundles.
        confirmed: Files with confirmations of the bundles' kernels, one for each GPU product,
            minor torch version and CUDA version. Each wheel gets those that confirm its kernels.
        key: Key that signs the parts of a signed bundle. Bundles that are packed whole keep their
            signatures.

    Raises:
        PackagingError: If there is no bundle, two bundles have one target, their platforms differ
            or have no wheel tag, the name, version or summary is not valid, confirmations fit no
            kernel or each other, or a bundle cannot be split into wheels small enough.
        BundleFormatError: If a bundle breaks a rule of the format.
        RankingsError: If a file with confirmations breaks a rule of its format.
        SignatureError: If a signature is for other content, the policy refuses a file, or a signed
            bundle has to be split without a key.
        StorageError: If a file cannot be read.
    """
    identify(name, version)
    contents = read_bundles(bundles)
    headers = [packed.header for packed in contents]
    platform_tag(headers)
    packer = _Packer(
        name=name,
        version=version,
        summary=summary,
        contents=contents,
        confirmed=confirmed_contents(confirmed, headers),
        key=key,
    )
    by_target = {packed.header.target.key: packed for packed in contents}
    is_small = sum(len(packed.data) for packed in contents) <= MAX_WHEEL_BYTES
    if len(by_target) == len(contents) and is_small:
        wheels = packer.encode([by_target])
        if len(wheels[0].data) <= MAX_WHEEL_BYTES:
            return wheels
    limit, excess = MAX_WHEEL_BYTES, 0
    for _ in range(_MOST_TRIES):
        wheels = packer.encode(packer.divide(limit))
        excess = max(len(wheel.data) for wheel in wheels) - MAX_WHEEL_BYTES
        if excess <= 0:
            return wheels
        limit -= excess
    raise PackagingError(
        f"wheel {name!r}: its parts have {MAX_WHEEL_BYTES + excess} bytes or more, at most "
        f"{MAX_WHEEL_BYTES} are allowed, so that any index takes them: lower the manifest's "
        "candidates per problem"
    )


@dataclass(frozen=True, kw_only=True)
class _Packer:
    """Bundles and what all their wheels share."""

    name: str
    version: str
    summary: str | None
    contents: Sequence[PackedBundle]
    confirmed: Mapping[str, ConfirmedContent]
    key: SigningKey | None

    def identity(self, number: int) -> WheelIdentity:
        """Returns a wheel's names, by its number."""
        name = self.name if number == 1 else f"{self.name}-part{number}"
        return identify(name, self.version)

    def encode(self, units: Sequence[Contents]) -> list[EncodedWheel]:
        """Encodes a wheel for each unit."""
        identities = [self.identity(number) for number in range(1, len(units) + 1)]
        headers = [packed.header for packed in self.contents]
        wheels = []
        for number, unit in enumerate(units, start=1):
            parts = Parts(number=number, identities=identities, headers=headers)
            filename, data = self._encode_one(unit, parts if len(units) > 1 else None)
            wheels.append(
                EncodedWheel(filename=filename, data=data, number=number, count=len(units))
            )
        return wheels

    def _encode_one(self, unit: Contents, parts: Parts | None) -> tuple[str, bytes]:
        own = [packed.header for packed in unit.values()]
        confirmed = {}
        for name, file in self.confirmed.items():
            if file.confirms(own):
                confirmed[name] = file.data
                if file.signatures is not None:
                    confirmed[f"{name}{SIGNATURE_SUFFIX}"] = file.signatures
        return encode_wheel(
            parts.identities[parts.number - 1] if parts else self.identity(1),
            unit,
            summary=self.summary,
            confirmed=confirmed,
            parts=parts,
        )

    def divide(self, limit: int) -> list[Contents]:
        """Divides the bundles by target, and by rows where a target's wheel is above a limit."""
        # A wheel with this description is as large as any of up to 99 parts, but for the first's
        # requirements, which `encode_wheels` counts.
        identities = [self.identity(99)] * 99
        headers = [packed.header for packed in self.contents]
        parts = Parts(number=99, identities=identities[:1] * 99, headers=headers)
        units: list[Contents] = []
        for packed in self.contents:
            key = packed.header.target.key

            def wheel_bytes(part: Part, key: str = key, whole: PackedBundle = packed) -> int:
                return len(self._encode_one({key: self._packed(whole, part)}, parts)[1])

            with Bundle(packed.path) as bundle:
                split = split_below(open_whole(bundle), limit, wheel_bytes)
            units += [{key: self._packed(packed, part)} for part in split]
        return units

    def _packed(self, whole: PackedBundle, part: Part) -> PackedBundle:
        """Returns a part, signed if the whole bundle is."""
        is_same = part.data == whole.data
        return PackedBundle(
            path=whole.path,
            header=part.header,
            data=part.data,
            signatures=whole.signatures
            if is_same or whole.signatures is None
            else part_signatures(whole.path, part.data, self.key),
        )
