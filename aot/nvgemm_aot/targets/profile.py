"""Device profiles: the facts of one GPU product that a machine without that GPU must know.

The numbers are data (`profiles/*.json`), each beside the source it was taken from.
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
    """A number and where it comes from.

    ``value`` is in the unit that its name says. ``basis`` is ``measured`` (read from a driver by
    this project), ``reported`` (a public source states it) or ``estimated`` (derived); ``source``
    says where it was read, or the rule it was derived by.
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
        platform: Host platform of the machines that it comes in, e.g. ``linux_aarch64`` beside a
            Grace processor.
        heuristics_gpu: The product's name in nvMatmulHeuristics.
        sm_count: Streaming multiprocessors.
        shared_memory_per_block_bytes: Most shared memory one thread block can opt in to.
        registers_per_thread: Most registers of a thread.
        max_active_clusters: By cluster size (thread blocks): how many clusters of blocks that each
            fill an SM run at once.
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
        """How many clusters of ``cluster_size`` thread blocks run at once.

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
"""Ways to know a number, the surest first."""


def basis_of_limit(
    profiles: Iterable[DeviceProfile], cluster_size: int, max_active: int
) -> str | None:
    """How the profiles that have a number of active clusters know it; None if none has it.

    If several have it, that is the least sure of their ways, which holds for all of these products.
    """
    facts = (profile.max_active_clusters.get(cluster_size) for profile in profiles)
    found = {fact.basis for fact in facts if fact is not None and fact.value == max_active}
    return max(found, key=BASES.index, default=None)


def profile_names() -> tuple[str, ...]:
    """Names of all device profiles, sorted."""
    return tuple(
        sorted(
            entry.name.removesuffix(".json")
            for entry in (files(__package__) / "profiles").iterdir()
            if entry.name.endswith(".json")
        )
    )


@functools.cache
def load_profile(name: str) -> DeviceProfile:
    """Load the device profile called ``name``.

    Raises:
        TargetError: If there is no such profile.
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
