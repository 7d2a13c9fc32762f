"""Device profiles: facts about a GPU product that a machine without that GPU must know.

The numbers are data (`profiles/*.json`), each with its source.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from nvgemm_runtime.errors import TargetError


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A number with its source.

    ``value`` has the unit in the field's name. ``basis`` is ``measured`` (read from a driver by
    this project), ``reported`` (stated by a public source) or ``estimated`` (derived). ``source``
    is the place where it was read, or the rule that it was derived by.
    """

    value: int
    basis: str
    source: str


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One GPU product.

    Attributes:
        name: Short product name, as in a manifest, e.g. ``B200``.
        driver_name: Name that the driver reports, e.g. ``NVIDIA B200``.
        capability: Compute capability (major, minor).
        platform: Host platform that the GPU is sold with, e.g. ``linux_aarch64`` with a Grace
            processor.
        heuristics_gpu: The product's name in nvMatmulHeuristics.
        sm_count: Number of streaming multiprocessors.
        shared_memory_per_block_bytes: Most shared memory that a thread block can opt in to.
        registers_per_thread: Most registers per thread.
        max_active_clusters: Number of concurrent clusters, by cluster size in thread blocks, where
            each block fills an SM.
    """

    name: str
    driver_name: str
    capability: tuple[int, int]
    platform: str
    heuristics_gpu: str
    sm_count: Fact
    shared_memory_per_block_bytes: Fact
    registers_per_thread: Fact
    max_active_clusters: dict[int, Fact]

    def cluster_capacity(self, cluster_size: int) -> Fact:
        """Returns the number of clusters with ``cluster_size`` thread blocks that run at once.

        Raises:
            TargetError: If the profile has no number for that size.
        """
        try:
            return self.max_active_clusters[cluster_size]
        except KeyError:
            known = ", ".join(map(str, sorted(self.max_active_clusters)))
            raise TargetError(
                f"device profile {self.name}: no max active clusters for cluster size "
                f"{cluster_size} (known: {known})"
            ) from None


BASES = ("measured", "reported", "estimated")
"""Bases for a number, the most reliable first."""


def basis_of_limit(
    profiles: Iterable[DeviceProfile], cluster_size: int, max_active: int
) -> str | None:
    """Returns the basis for a number of active clusters, or None if no profile has the number.

    If several profiles have it, returns the least reliable basis, which holds for all their
    products.
    """
    facts = (profile.max_active_clusters.get(cluster_size) for profile in profiles)
    bases = {fact.basis for fact in facts if fact is not None and fact.value == max_active}
    return max(bases, key=BASES.index, default=None)


def profile_names() -> tuple[str, ...]:
    """Returns all device profile names, sorted."""
    return tuple(
        sorted(
            entry.name.removesuffix(".json")
            for entry in (files(__package__) / "profiles").iterdir()
            if entry.name.endswith(".json")
        )
    )


@functools.cache
def load_profile(name: str) -> DeviceProfile:
    """Loads a device profile by name.

    Raises:
        TargetError: If no profile has the name.
    """
    if name not in profile_names():
        raise TargetError(
            f"no device profile is called {name!r} (known: {', '.join(profile_names())})"
        )
    data: dict[str, Any] = json.loads(
        (files(__package__) / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    )
    return DeviceProfile(
        name=name,
        driver_name=data["driver_name"]["value"],
        capability=tuple(data["compute_capability"]["value"]),
        platform=data["platform"],
        heuristics_gpu=data["heuristics_gpu"],
        sm_count=Fact(**data["sm_count"]),
        shared_memory_per_block_bytes=Fact(**data["shared_memory_per_block_bytes"]),
        registers_per_thread=Fact(**data["registers_per_thread"]),
        max_active_clusters={
            int(size): Fact(**fact) for size, fact in data["max_active_clusters"].items()
        },
    )
