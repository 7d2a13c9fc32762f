"""Finds kernel wheels that installed kernel wheels require and that are missing.

A large kernel wheel is split into parts that require each other in exactly one version.
"""

from __future__ import annotations

import contextlib
import re
from importlib.metadata import distributions

from .discover import DISTRIBUTION_PREFIX, canonical_name

_PREFIX = "[-_.]+".join(map(re.escape, DISTRIBUTION_PREFIX.split("-")))
_NAME = re.compile(rf"^name:\s*{_PREFIX}", re.IGNORECASE | re.MULTILINE)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*==\s*([^\s;,]+)")


def missing_wheels() -> tuple[str, ...]:
    """Describes every required kernel wheel that is missing or of another version, sorted."""
    versions: dict[str, str] = {}
    required: list[tuple[str, str, str]] = []
    for distribution in distributions():
        with contextlib.suppress(Exception):  # third-party metadata can be wrong in any way
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
            if not _NAME.search(text or ""):
                continue  # parsing the metadata of a whole environment takes half a second
            name, version = distribution.metadata["Name"], distribution.metadata["Version"]
            key = canonical_name(name or "")
            if not key.startswith(DISTRIBUTION_PREFIX) or key in versions:
                continue
            versions[key] = version
            for line in distribution.metadata.get_all("Requires-Dist") or ():
                match = _REQUIREMENT.match(line)
                if match and canonical_name(match[1]).startswith(DISTRIBUTION_PREFIX):
                    required.append((f"{name} {version}", canonical_name(match[1]), match[2]))
    return tuple(
        f"{origin} requires {name}=={version}, and {_installed_text(versions.get(name))}; its "
        "kernels come in several wheels: install all of one version, and uninstall others"
        for origin, name, version in sorted(set(required))
        if versions.get(name) != version
    )


def _installed_text(version: str | None) -> str:
    return "it is not installed" if version is None else f"{version} is installed"
