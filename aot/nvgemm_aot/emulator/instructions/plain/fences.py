"""Fences (PTX ISA, "membar, fence"), which tell the ordering what they order."""

from __future__ import annotations

from ...machine.hierarchy import Warp
from ...machine.lanes import Mask
from ...machine.meanings import Step, going_on
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes

_SCOPES = ("cta", "cluster", "gpu", "sys")

_ASYNC_SPACES = ("global", "shared::cta", "shared::cluster")


@decodes("fence")
def _fence(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    if qualifiers.flag("proxy"):
        return _proxy_fence(qualifiers, instruction)
    if qualifiers.flag("mbarrier_init"):
        qualifiers.one_of("release")
        qualifiers.one_of("cluster")
        qualifiers.end()
        return _barriers_initialised
    order = qualifiers.option("sc", "acq_rel", "acquire", "release")
    if order in ("acquire", "release") and qualifiers.option(
        "sync_restrict::shared::cta", "sync_restrict::shared::cluster"
    ):
        qualifiers.one_of("cluster")
    else:
        qualifiers.one_of(*_SCOPES)
    qualifiers.end()
    return _full_fence


def _proxy_fence(qualifiers: Qualifiers, instruction: Instruction) -> Step:
    kind = qualifiers.one_of("async", "async::generic", "alias", "tensormap::generic")
    if kind == "async":
        space = qualifiers.option(*_ASYNC_SPACES)
        qualifiers.end()
        return _nothing if space == "global" else _async_fence
    if kind == "async::generic":
        qualifiers.one_of("acquire", "release")
        qualifiers.one_of("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        qualifiers.one_of("cluster")
    elif kind == "tensormap::generic":
        qualifiers.one_of("acquire", "release")
        qualifiers.one_of(*_SCOPES)
    qualifiers.end()
    return _async_fence if kind == "async::generic" else _nothing


@decodes("membar")
def _memory_barrier(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    if qualifiers.flag("proxy"):
        return _proxy_fence(qualifiers, instruction)
    qualifiers.one_of("cta", "gl", "sys")
    qualifiers.end()
    return _full_fence


@going_on
def _full_fence(warp: Warp, mask: Mask) -> None:
    warp.block.cluster.grid.ordering.fence(warp)


@going_on
def _async_fence(warp: Warp, mask: Mask) -> None:
    warp.block.cluster.grid.ordering.fence_async(warp)


@going_on
def _barriers_initialised(warp: Warp, mask: Mask) -> None:
    warp.block.cluster.grid.ordering.fence_initialised_barriers(warp)


@going_on
def _nothing(warp: Warp, mask: Mask) -> None:
    """Orders accesses of generic memory, which are done in order here anyway."""
