"""Checks that kept PTX is what a payload's device code was assembled from, as far as both show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..host.elf import MalformedElfError
from .cubin import MAX_REGISTERS_PER_BLOCK, Cubin, DeviceKernel, read_cubins

_ENTRY = re.compile(
    r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$%]+)\s*(?:\([^)]*\))?([^{;]*)\{", re.M
)
_TARGET = re.compile(r"^\s*\.target\s+(sm_[0-9]+[af]?)\b", re.M)
_RELEASE = re.compile(r"^// Cuda compilation tools, release ([0-9]+)\.([0-9]+)", re.M)
_DIRECTIVE = re.compile(r"\.(reqntid|maxntid|maxnreg|minnctapersm)\s+([0-9]+(?:\s*,\s*[0-9]+)*)")
_CTA_GROUP = re.compile(r"^\s*(?:@!?%\w+\s+)?tcgen05\.[\w.:]*\.cta_group::([12])\b", re.M)
_ASKS_FOR_WORK = re.compile(r"^\s*(?:@!?%\w+\s+)?clusterlaunchcontrol\.try_cancel\b", re.M)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A kernel's directives (PTX ISA, "Performance-Tuning Directives") and telling instructions.

    Attributes:
        limits: Numbers of each directive, by its name.
        cta_groups: Thread blocks that issue tcgen05 instructions together.
    """

    limits: dict[str, tuple[int, ...]]
    cta_groups: frozenset[int]
    asks_for_work: bool


def ptx_faults(ptx: str, payload: bytes) -> Iterator[str]:
    """Yields how PTX differs from a payload's device code: architecture, names, registers.

    Also compares threads, CUDA version, thread blocks for a tcgen05 instruction, and cluster launch
    control. PTX without differences may still be another kernel's with the same name and limits:
    only compiling again proves more.
    """
    try:
        cubins = read_cubins(payload)
    except MalformedElfError as error:
        yield f"the payload's device code cannot be read: {error}"
        return
    if len(cubins) != 1:
        yield f"the payload has {len(cubins)} device codes, PTX belongs to one"
        return
    [cubin] = cubins
    yield from _architecture_faults(ptx, cubin)
    entries = _entries(ptx)
    kernels = {kernel.name: kernel for kernel in cubin.kernels}
    if entries.keys() != kernels.keys():
        yield f"kernels {', '.join(entries) or 'none'}, device code has {', '.join(kernels)}"
    for name in entries.keys() & kernels.keys():
        yield from (f"{name}: {fault}" for fault in _kernel_faults(entries[name], kernels[name]))


def _architecture_faults(ptx: str, cubin: Cubin) -> Iterator[str]:
    target = _TARGET.search(ptx)
    if target is None:
        yield "no .target directive"
        return
    named = target[1]
    if cubin.compiled_for is not None and named != cubin.compiled_for:
        yield f"target {named}, device code was compiled for {cubin.compiled_for}"
    elif named.removesuffix("f") != cubin.architecture:
        yield f"target {named}, device code is for {cubin.architecture}"
    release = _RELEASE.search(ptx)
    versions = {kernel.cuda_version for kernel in cubin.kernels}
    if release is not None and {10 * int(release[1]) + int(release[2])} != versions:
        compiled = ", ".join(str(version / 10) for version in sorted(versions))
        yield f"from CUDA {release[1]}.{release[2]}, device code was compiled with {compiled}"


def _entries(ptx: str) -> dict[str, _Entry]:
    matches = list(_ENTRY.finditer(ptx))
    ends = [*(match.start() for match in matches[1:]), len(ptx)]
    entries = {}
    for match, end in zip(matches, ends):
        body = ptx[match.end() : end]
        entries[match[1]] = _Entry(
            limits={
                name: tuple(int(number) for number in numbers.split(","))
                for name, numbers in _DIRECTIVE.findall(match[2])
            },
            cta_groups=frozenset(int(group) for group in _CTA_GROUP.findall(body)),
            asks_for_work=_ASKS_FOR_WORK.search(body) is not None,
        )
    return entries


def _kernel_faults(entry: _Entry, kernel: DeviceKernel) -> Iterator[str]:
    limits = entry.limits
    threads = math.prod(limits["reqntid"]) if "reqntid" in limits else None
    if threads != kernel.threads:
        yield f"{threads} threads a block, device code requires {kernel.threads}"
    if "maxnreg" in limits and kernel.registers > limits["maxnreg"][0]:
        yield f"at most {limits['maxnreg'][0]} registers, device code has {kernel.registers}"
    most_threads = math.prod(limits.get("reqntid") or limits.get("maxntid") or (1,))
    blocks = limits.get("minnctapersm", (1,))[0]
    if (registers := blocks * most_threads * kernel.registers) > MAX_REGISTERS_PER_BLOCK:
        yield (
            f"{blocks} blocks of {most_threads} threads must fit a multiprocessor, device code "
            f"has {kernel.registers} registers, {registers} in all"
        )
    if kernel.ctas_per_tile is not None and entry.cta_groups != {kernel.ctas_per_tile}:
        groups = ", ".join(map(str, sorted(entry.cta_groups))) or "none"
        yield f"tcgen05 by {groups} CTAs together, device code by {kernel.ctas_per_tile}"
    if kernel.cluster_launch_control not in (None, entry.asks_for_work):
        yield (
            f"{'has' if entry.asks_for_work else 'no'} cluster launch control, device code "
            f"{'has' if kernel.cluster_launch_control else 'has none'}"
        )
