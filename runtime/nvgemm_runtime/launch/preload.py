"""Preloads kernels before serving, or before a CUDA graph capture."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..bundle.format import Header
from ..bundle.reader import Bundle
from ..errors import BundleFormatError, NoKernelError, StorageError
from ..gemm.operands import MAX_ALIGNMENT_BYTES, Request
from ..installed.discover import DISTRIBUTION_PREFIX, canonical_name
from ..installed.registry import INSTALLATION, FoundBundle
from ..matching.device import DeviceFacts, device_facts
from ..matching.evidence import Evidence
from ..matching.index import all_but_m
from ..matching.refusals import device_refusal, kernel_refusals
from ..settings import default_mode, is_off
from .compiled import default_device, load_for, named_kernels, why_for_another_device
from .dispatch_table import find_dispatch
from .loading.upload import is_capturing, upload

if TYPE_CHECKING:
    import torch

_EXPERTS = "nvgemm_runtime.moe"
"""Package, once imported, that looks up expert kernels at their first call."""

REPORT_S = 5.0
"""Seconds between progress messages in the log."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Preloaded:
    """Result from `preload`.

    Attributes:
        kernels: Number of kernels that can now run on the device without loading anything.
        seconds: Duration.
        code_bytes: Uncompressed payload size, host and device code.
        device_bytes: Device memory used, without torch's cache for tensors; 0 on the CPU.
        failures: Reasons why kernels were not loaded, by id; ATen computes instead.
        skipped: Reasons why kernels belong to another device, by id; they were not tried.
    """

    kernels: int
    seconds: float
    code_bytes: int
    device_bytes: int
    failures: Mapping[str, str]
    skipped: Mapping[str, str] = field(default_factory=dict)


def preload(
    manifest: str | None = None,
    *,
    device: torch.device | str | int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Preloaded:
    """Loads kernels, with their code on a device, before their first call.

    Args:
        manifest: Name of a manifest whose kernel wheel is installed, or whose bundle is in
            NVGEMM_AOT_BUNDLES, whole or in parts. Loads the first-ranked kernel for each of its
            problems, and the kernels in their dispatch tables. None loads every kernel that
            compiled graphs in this process may call; if `nvgemm_runtime.moe` is imported, also the
            first-ranked kernel for each expert product that usable bundles declare.
        device: Device for the calls; by default the current CUDA device, or the CPU without one.
        progress: Callback, called after each kernel with the number done and the total. Preloads
            longer than a few seconds also log this (level INFO).

    A kernel that fails to load is listed in the result and does not stop the others. A bundle that
    cannot be read is logged. Kernels for
    another device, such as the CPU or another GPU architecture, are not tried; the result lists
    them as skipped. Under ``NVGEMM_AOT=off`` nothing is loaded. During a CUDA graph capture on the
    current stream, kernels load into the process, and each uploads its code at its first launch.

    Raises:
        NoKernelError: If no installed or named bundle belongs to the manifest.
        SettingError: If NVGEMM_AOT has an unknown value.
        TypeError: If ``manifest`` is neither a name nor None.
        ValueError: If ``manifest`` is empty, or ``device`` is neither the CPU nor a visible CUDA
            device.
    """
    import torch

    if manifest is not None and not isinstance(manifest, str):
        raise TypeError(f"preload: manifest is {manifest!r}, must be a manifest's name or None")
    if manifest == "":
        raise ValueError(
            "preload: manifest is '', must be a manifest's name; leave it out to load the kernels "
            "of this process's compiled graphs"
        )
    default_mode()  # raises for an unknown mode
    torch_device = default_device() if device is None else _checked_device(device)
    if torch_device == torch.device("cuda"):  # means the current device
        torch_device = default_device()
    facts = device_facts(torch_device.type, torch_device.index or 0)
    kernel_ids: list[str] = []
    if not is_off() and manifest is not None:
        kernel_ids += _manifest_kernels(manifest, facts)
    elif not is_off():
        experts = _expert_kernels(facts) if _EXPERTS in sys.modules else ()
        kernel_ids += dict.fromkeys((*named_kernels(), *experts))
    reasons = ((kernel_id, why_for_another_device(kernel_id, facts)) for kernel_id in kernel_ids)
    skipped = {kernel_id: reason for kernel_id, reason in reasons if reason is not None}
    loadable = [kernel_id for kernel_id in kernel_ids if kernel_id not in skipped]
    start = last_report = time.monotonic()
    free = _free_bytes(torch_device)
    code_bytes = 0
    failures: dict[str, str] = {}
    for done, kernel_id in enumerate(loadable, start=1):
        try:
            kernel = load_for(kernel_id, facts)
            upload(kernel, torch_device)
            code_bytes += kernel.kernel.span.content_bytes
        except Exception as error:
            failures[kernel_id] = str(error)
        if progress is not None:
            progress(done, len(loadable))
        if time.monotonic() - last_report > REPORT_S:
            last_report = time.monotonic()
            _log.info("%d of %d kernels are loaded", done, len(loadable))
    # Synchronizing would break a capture, into which nothing was launched.
    if torch_device.type == "cuda" and not is_capturing(torch_device):
        torch.cuda.synchronize(torch_device)
    return Preloaded(
        kernels=len(loadable) - len(failures),
        seconds=time.monotonic() - start,
        code_bytes=code_bytes,
        device_bytes=max(0, free - _free_bytes(torch_device)),
        failures=failures,
        skipped=skipped,
    )


def _checked_device(device: torch.device | str | int) -> torch.device:
    """Returns a device on which kernels can run.

    Raises:
        ValueError: If it cannot.
    """
    import torch

    count = torch.cuda.device_count()
    where = None
    try:
        if not isinstance(device, int):
            where = torch.device(device)
        elif 0 <= device < count:  # torch takes larger numbers modulo 256
            where = torch.device("cuda", device)
    except (RuntimeError, TypeError):  # not a device
        pass
    if where is not None and where.type == "cpu":
        return where
    if where is None or where.type != "cuda" or (where.index or 0) >= count:
        raise ValueError(
            f"preload: device is {device!r}, and torch sees {count} CUDA devices: name one of "
            "these, or 'cpu', or leave it out"
        )
    return where


def _free_bytes(device: torch.device) -> int:
    """Returns a CUDA device's free memory, including torch's cache for tensors."""
    import torch

    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device))


def _manifest_kernels(manifest: str, facts: DeviceFacts) -> Iterator[str]:
    """Returns the kernel ids for a manifest's problems, each once.

    These are the first-ranked kernel for each problem, and the kernels in its dispatch table;
    includes kernels for other devices.
    """
    bundles = [
        installed
        for installed in INSTALLATION.shipped_bundles()
        if _is_built_from(installed, manifest)
    ]
    if not bundles:
        origins = ", ".join(
            sorted({installed.origin for installed in INSTALLATION.shipped_bundles()})
        )
        raise NoKernelError(
            f"no bundle of manifest {manifest} is installed (installed: {origins or 'none'}); "
            f"install the wheel {DISTRIBUTION_PREFIX}{canonical_name(manifest)}, or name its "
            "bundle in NVGEMM_AOT_BUNDLES"
        )
    return iter(dict.fromkeys(_of_readable(bundles, facts, _bundle_kernels)))


def _of_readable(
    found: Iterable[FoundBundle],
    facts: DeviceFacts,
    kernels_of: Callable[[FoundBundle, Bundle, DeviceFacts], Iterator[str]],
) -> Iterator[str]:
    """Yields the kernel ids in each open bundle, and logs which cannot be read."""
    for installed in found:
        if installed.bundle is None:
            continue
        try:
            yield from kernels_of(installed, installed.bundle, facts)
        except (BundleFormatError, StorageError) as error:
            _log.warning("preload: bundle left out (%s): %s", installed.origin, error)


def _bundle_kernels(installed: FoundBundle, bundle: Bundle, facts: DeviceFacts) -> Iterator[str]:
    header = bundle.header
    reasons: list[str | None]
    if installed.refusal(facts) is None:
        reasons = kernel_refusals(header, facts)
        yield from _first_ranked(header, facts, reasons)
        yield from _dispatched_kernels(header, facts)
    elif device_refusal(header.target, facts) is not None:
        reasons = [None] * len(header.kernels)
        reasons += [kernel.why for kernel in header.unknown_kernels]
        yield from _first_ranked(header, facts, reasons)


def _expert_kernels(facts: DeviceFacts) -> Iterator[str]:
    """Yields the first-ranked kernel's id for each expert problem in every usable bundle."""
    return _of_readable(INSTALLATION.shipped_bundles(), facts, _bundle_expert_kernels)


def _bundle_expert_kernels(
    installed: FoundBundle, bundle: Bundle, facts: DeviceFacts
) -> Iterator[str]:
    if installed.refusal(facts) is None:
        for header in _expert_headers(bundle):
            reasons = kernel_refusals(header, facts)
            yield from _first_ranked(header, facts, reasons, of_experts=True)


def _expert_headers(bundle: Bundle) -> Iterator[Header]:
    """Yields headers with all expert problems; of one in pages, only their parts."""
    pages = bundle.pages()
    if pages is None:
        yield bundle.header
        return
    for signature in pages.signatures():
        if signature.op.is_moe:
            yield pages.signature(signature)


def _first_ranked(
    header: Header,
    facts: DeviceFacts,
    reasons: Sequence[str | None],
    *,
    of_experts: bool = False,
) -> Iterator[str]:
    """Yields per problem, or expert problem, the id of its best kernel without a refusal."""
    for ranking in header.rankings_on(facts.name):
        if of_experts and not ranking.problem.signature.op.is_moe:
            continue
        usable = (entry.kernel for entry in ranking.kernels if reasons[entry.kernel] is None)
        first = next(usable, None)
        if first is not None:
            yield header.kernels[first].id


def _dispatched_kernels(header: Header, facts: DeviceFacts) -> Iterator[str]:
    """Yields the kernel ids in the measured dispatch tables for a bundle's problems."""
    problems = [ranking.problem for ranking in header.rankings_on(facts.name)]
    rows = {all_but_m(problem): problem for problem in problems}
    for problem in rows.values():
        request = Request(problem=problem, alignment_bytes=MAX_ALIGNMENT_BYTES)
        for evidence in (None, Evidence.ONCE):
            _, dispatch = find_dispatch([request], facts, evidence=evidence)
            yield from dispatch.table.used


def _is_built_from(installed: FoundBundle, manifest: str) -> bool:
    """Returns True if a bundle, or one it is a part of, was built from a manifest, by its names.

    Its file's name counts, and its wheel's.
    """
    name = re.escape(canonical_name(manifest))
    if installed.bundle is not None:
        target = re.escape(canonical_name(installed.bundle.facts.target.key))
        file = canonical_name(installed.path.stem)
        if re.fullmatch(rf"{name}(-\d+of\d+)?-{target}", file):
            return True
    distribution = canonical_name(installed.origin.split(" ")[0])
    pattern = rf"{re.escape(DISTRIBUTION_PREFIX)}{name}(-part\d+)?"
    return re.fullmatch(pattern, distribution) is not None
