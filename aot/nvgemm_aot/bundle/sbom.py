"""Software bill of materials for a kernel wheel: a CycloneDX 1.6 document.

Written directly, not through `cyclonedx-python-lib`: that library adds a random serial number and
the current time, and brings a serialisation framework for the few fields used here. Both values are
optional in CycloneDX and left out, so equal bundles give equal bytes. The tests check the result
against the published schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.errors import PackagingError

RUNTIME = "nvgemm-aot"
"""Distribution whose runtime loads the bundles."""


@dataclass(frozen=True, kw_only=True)
class BundledFile:
    """A bundle inside a wheel.

    ``path`` is relative to the wheel; ``sha256`` is the whole file's digest, in hex.
    """

    path: str
    sha256: str
    header: Header


def render_sbom(
    *,
    distribution: str,
    version: str,
    license_expression: str,
    files: Sequence[BundledFile],
    required: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Describes a wheel: its bundles, their toolchain, and its requirements.

    Toolchain components have the scope ``excluded``, CycloneDX's word for tools that shaped a
    product without being part of it. ``required`` are names and versions of other kernel wheels.

    The document has neither a serial number nor a time.
    """
    root = _purl(distribution, version)
    tools = sorted({item for file in files for item in file.header.toolchain.items()})
    runtime = f"pkg:pypi/{RUNTIME}"
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [_tool_component(RUNTIME, __version__, scope=None)]},
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": distribution,
                "version": version,
                "purl": root,
                "licenses": [{"expression": license_expression}],
            },
        },
        "components": [
            *(_bundle_component(file, license_expression) for file in files),
            {
                "type": "library",
                "bom-ref": runtime,
                "name": RUNTIME,
                "scope": "required",
                "purl": runtime,
            },
            *(
                {
                    "type": "library",
                    "bom-ref": _purl(*wheel),
                    "name": wheel[0],
                    "version": wheel[1],
                    "scope": "required",
                    "purl": _purl(*wheel),
                }
                for wheel in required
            ),
            *(_tool_component(*tool, scope="excluded") for tool in tools),
        ],
        "dependencies": [
            {
                "ref": root,
                "dependsOn": sorted(
                    [runtime, *map(_file_ref, files), *(_purl(*wheel) for wheel in required)]
                ),
            },
            *(
                {
                    "ref": _file_ref(file),
                    "dependsOn": sorted(_purl(*tool) for tool in file.header.toolchain.items()),
                }
                for file in files
            ),
        ],
    }
    return json.dumps(document, indent=2).encode("ascii") + b"\n"


def _bundle_component(file: BundledFile, license_expression: str) -> dict[str, Any]:
    header = file.header
    facts = {
        "target": header.target.key,
        "device": ", ".join(header.devices),
        "kernels": str(len(header.kernels)),
        "problems": str(header.declared_count),
        "generator": header.generator,
        "build_key": header.build_key,
    }
    return {
        "type": "file",
        "bom-ref": _file_ref(file),
        "name": file.path,
        "hashes": [{"alg": "SHA-256", "content": file.sha256}],
        "licenses": [{"expression": license_expression}],
        "properties": [{"name": f"nvgemm:{name}", "value": value} for name, value in facts.items()],
    }


def _tool_component(name: str, version: str, *, scope: str | None) -> dict[str, Any]:
    purl = _purl(name, version)
    # A tool that made the document must not share its reference with a component it describes.
    component = {"type": "application", "name": name, "version": version, "purl": purl}
    return component if scope is None else {**component, "bom-ref": purl, "scope": scope}


def _file_ref(file: BundledFile) -> str:
    return f"file:{file.path}"


def _purl(name: str, version: str) -> str:
    """Returns the package URL for a distribution, or a generic one for any other tool.

    Distributions are this project, its kernel wheels, and the dependencies in this project's
    metadata: the same on every machine, whatever is installed there. The system's linker, for
    example, is no distribution.
    """
    try:
        requirements = requires(RUNTIME) or ()
    except PackageNotFoundError as error:
        raise PackagingError(f"{RUNTIME} has no metadata here: install it") from error
    known = {canonicalize_name(Requirement(line).name) for line in requirements}
    canonical = canonicalize_name(name)
    is_own_distribution = canonical == RUNTIME or canonical.startswith("nvgemm-kernels-")
    if is_own_distribution or canonical in known:
        return f"pkg:pypi/{canonical}@{quote(version, safe='')}"
    return f"pkg:generic/{quote(name, safe='')}@{quote(version, safe='')}"
