"""Writes the wheels that a GPU machine installs: kernel bundles and the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal.printing import file_document, file_text

if TYPE_CHECKING:
    from ...storage.private_key import SigningKey

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Wheel of the installed runtime.

    Attributes:
        filename: File name; empty if the runtime cannot be packed.
        data: The wheel's bytes.
        problem: Reason why it cannot be packed, with the next step, or empty.
    """

    filename: str = ""
    data: bytes = b""
    problem: str = ""


def prepare_wheels(out: Path, *, name: str, version: str) -> Runtime:
    """Packs the runtime, and refuses invalid wheels before time is spent on kernels.

    Args:
        out: Directory for the wheels.
        name: Suffix of the kernel wheels' name after ``nvgemm-kernels-``.
        version: Version of the kernel wheels.

    Raises:
        PackagingError: If the name or version is not valid, the installation is damaged, or the
            directory has a wheel that pip would confuse with one of these.
        StorageError: If a file cannot be read.
    """
    from ...bundle.repack_runtime import (
        encode_runtime_wheel,
        packing_refusal,
        refuse_other_runtimes,
    )
    from ...bundle.wheel_names import identify, refuse_other_versions

    refuse_other_versions(out, identify(name, version))
    problem = packing_refusal()
    if problem is not None:
        return Runtime(problem=problem)
    filename, data = encode_runtime_wheel()
    refuse_other_runtimes(out, filename)
    return Runtime(filename=filename, data=data)


def write_wheels(
    bundles: Mapping[str, Sequence[Path]],
    runtime: Runtime,
    *,
    name: str,
    version: str,
    summary: str | None,
    out: Path,
    confirmed: Sequence[Path] = (),
    key: SigningKey | None = None,
) -> Document:
    """Writes each platform's bundles as wheels, and the runtime's; returns the written files.

    Writes nothing before all wheels are encoded, so that a failure leaves none behind.

    Args:
        bundles: Bundles by platform, because a wheel has one platform.
        runtime: Runtime wheel from `prepare_wheels`.
        name: Suffix of the kernel wheels' name after ``nvgemm-kernels-``.
        version: Version of the kernel wheels.
        summary: One line about the kernel wheels.
        out: Output directory.
        confirmed: Files with confirmations, for every kernel wheel.
        key: Key that signs the parts of signed bundles that one wheel cannot hold.
    """
    from ...bundle.repack_runtime import runtime_platform
    from ...bundle.wheel_names import identify, refuse_other_parts
    from ...bundle.wheel_set import encode_wheels
    from ...storage.files import write_all

    identity = identify(name, version)
    wheels = [
        wheel
        for paths in bundles.values()
        for wheel in encode_wheels(
            paths, name=name, version=version, summary=summary, confirmed=confirmed, key=key
        )
    ]
    refuse_other_parts(out, identity, [wheel.filename for wheel in wheels])
    platform = runtime_platform(runtime.filename) if runtime.filename else None
    runtimes = [(runtime.filename, runtime.data)] if platform in bundles else []
    write_all(
        {out / wheel.filename: wheel.data for wheel in wheels}
        | {out / filename: data for filename, data in runtimes}
    )
    return {
        "wheels": [
            {**file_document(out / wheel.filename), "part": wheel.number, "parts": wheel.count}
            for wheel in wheels
        ],
        "distribution": identity.distribution,
        "runtime_wheels": [file_document(out / filename) for filename, _ in runtimes],
        "runtimes_not_packed": [
            {"platform": host, "reason": runtime.problem or _release_command(host)}
            for host in bundles
            if host != platform
        ],
    }


def _part_lines(document: Document) -> list[str]:
    """Says which wheels belong together, for each platform whose kernels take several."""
    wheels = document.get("wheels", ())
    lines = []
    for position, wheel in enumerate(wheels):
        if wheel["part"] == 1 and wheel["parts"] > 1:
            files = [Path(w["path"]).name for w in wheels[position : position + wheel["parts"]]]
            lines.append(
                f"{document['distribution']} is split into {wheel['parts']} wheels, because one "
                "would be too large for an index; the first requires the others, so upload or copy "
                f"all: {' '.join(files)}"
            )
    return lines


def _release_command(platform: str) -> str:
    processor = platform.removeprefix("linux_")
    return (
        "the installed one is for another platform; in a checkout, run: python wheels/release "
        f"--runtime-only --once --platform {processor} --output DIRECTORY"
    )


def wheel_lines(document: Document) -> list[str]:
    """Renders one line per written wheel, and one per platform without the runtime's wheel."""
    return [
        *map(file_text, document.get("wheels", ())),
        *_part_lines(document),
        *map(file_text, document.get("runtime_wheels", ())),
        *(
            f"{entry['platform']}: no runtime wheel: {entry['reason']}"
            for entry in document.get("runtimes_not_packed", ())
        ),
    ]
