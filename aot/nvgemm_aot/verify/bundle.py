"""Checks each kernel in a bundle against its entry, and shows the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Header, Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TargetError, count_text
from nvgemm_runtime.gemm.target import CPU

from ..targets.profile import DeviceProfile, load_profile
from .device.disassembler import (
    INSTALL_COMMAND,
    Disassembler,
    find_disassembler,
    require_disassembler,
)
from .device.kernel_design import KNOWN_PROVIDERS
from .findings import Check, Finding
from .kernel_inspection import KernelEvidence, inspect_kernel

Progress = Callable[[int, int], None]
"""Called in the caller's thread after each kernel, with the number done and the total."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Verification result.

    ``device`` names the profiles that limits come from, ``disassembler`` the program, if any.
    ``notes`` say how far the checks went; ``findings`` is empty for a good bundle.
    """

    path: Path
    target: str
    device: str
    disassembler: str | None
    notes: tuple[str, ...]
    kernels: tuple[KernelEvidence, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if every check made holds."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Returns everything as values that ``json.dumps`` accepts."""
        findings = [
            {"kernel": finding.kernel, "check": finding.check.value, "message": finding.message}
            for finding in self.findings
        ]
        return asdict(self) | {"path": str(self.path), "ok": self.ok, "findings": findings}


def verify_bundle(
    path: Path,
    *,
    disassemble: bool | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Checks a bundle's rules and hashes, and its kernels' contents.

    Args:
        path: Bundle path.
        disassemble: True to check device code; None to do so if the disassembler is installed.
        jobs: Kernels to inspect, and so disassembler processes to run, at once.
        progress: Called after each finished kernel.

    Raises:
        StorageError: If the bundle cannot be read.
        BundleFormatError: If it breaks a rule in FORMAT.md, or content differs from its digest.
        ToolchainError: If ``disassemble`` is true and no disassembler is installed.
    """
    disassembler = None
    if disassemble is not False:
        disassembler = require_disassembler() if disassemble else find_disassembler()
    with Bundle(path) as bundle:
        bundle.check_body()
        header = bundle.header
        profiles, findings = _load_devices(header)
        if header.target.arch == CPU:
            disassembler = None

        def inspect(kernel: Kernel) -> tuple[KernelEvidence, list[Finding]]:
            evidence, kernel_findings = inspect_kernel(
                kernel,
                bundle.payload(kernel),
                target=header.target,
                profiles=profiles,
                disassembler=disassembler,
                stated_imports=header.imports if kernel.imports is None else kernel.imports,
            )
            return evidence, [replace(finding, kernel=kernel.id) for finding in kernel_findings]

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            futures = [pool.submit(inspect, kernel) for kernel in header.kernels]
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    future.result()
                    if progress is not None:
                        progress(done, len(futures))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        results = [future.result() for future in futures]
        for unknown in header.unknown_kernels:
            bundle.payload(unknown)  # checks its digest
    for _, kernel_findings in results:
        findings += kernel_findings
    return Report(
        path=Path(path),
        target=header.target.key,
        device=", ".join(header.devices),
        disassembler=str(disassembler) if disassembler else None,
        notes=(
            *_notes(header, disassemble, disassembler),
            *_unseen_notes(evidence for evidence, _ in results),
        ),
        kernels=tuple(evidence for evidence, _ in results),
        findings=tuple(findings),
    )


UNPROVED = (
    "payloads do not prove: tile k (compared with the operator's name); compiled-in cluster limits "
    "(compared with the device profile); that host code loads (nothing is loaded) on any processor "
    "(only signs of AVX, and on Arm of SVE, SME and atomics, are searched for). Versions and "
    "rankings are unchecked, and only a GPU shows that results are correct"
)
"""Note on facts that stay open even if every check holds."""


POINTERS = (
    "launchers that take pointers (for kernels with block scales) show no types, ranks or "
    "alignment; disassembled code shows the types of A, B, their scales and the result; alignment "
    "and the scales' layout in memory are unchecked"
)
"""Note on kernels that take their operands' addresses."""

EPILOGUES = (
    "for an epilogue, the launcher shows its operands' types and ranks; disassembled code shows "
    "its activation, the number of values stored for each gate, and fp32 arithmetic; the "
    "combination of these, the columns that a gate joins, and the order of two arguments with the "
    "same type and rank are unchecked"
)
"""Note on kernels that do more than multiply and round."""

GROUPS = "for groups, that offsets are group ends is unchecked"
"""Note on operations with groups."""


HOST_ONLY = (
    "kernels for the CPU have no device code: digests, calling convention and host code were "
    "checked; signature, alignment and design are unchecked"
)
"""Note on target ``cpu``, whose payloads show less."""


def _notes(
    header: Header, disassemble: bool | None, disassembler: Disassembler | None
) -> Iterator[str]:
    if header.target.arch == CPU:
        yield HOST_ONLY
    else:
        yield from _notes_on_device_code(header, disassemble, disassembler)
    if unknown := header.unknown_kernels:
        count = count_text(len(unknown), "kernel")
        yield f"only digests were checked of {count}: {unknown[0].why}"


def _unseen_notes(kernels: Iterable[KernelEvidence]) -> Iterator[str]:
    """Yields each fact that kernels from unknown providers do not show, with their number."""
    counts = Counter(text for kernel in kernels for text in kernel.unseen)
    for text, count in sorted(counts.items()):
        yield f"unchecked for {count_text(count, 'kernel')} from unknown providers: {text}"


def _notes_on_device_code(
    header: Header, disassemble: bool | None, disassembler: Disassembler | None
) -> Iterator[str]:
    yield UNPROVED
    signatures = {kernel.signature for kernel in header.kernels}
    conventions = {parse_calling_convention(kernel.calling_convention) for kernel in header.kernels}
    if any(convention is not None and convention.needs_compact for convention in conventions):
        yield POINTERS
    if any(
        signature.epilogue or (signature.scales and not signature.scales.is_swizzled)
        for signature in signatures
    ):
        yield EPILOGUES
    if any(signature.op.has_groups for signature in signatures):
        yield GROUPS
    unknown_providers = {kernel.provider for kernel in header.kernels} - KNOWN_PROVIDERS
    if unknown_providers:
        yield (
            f"operator names from {', '.join(sorted(unknown_providers))} are not parsed, so tile "
            "k, and static_persistent against one_tile schedulers, are unchecked"
        )
    if disassembler is None:
        why = (
            "not requested"
            if disassemble is False
            else f"no nvdisasm found; run: {INSTALL_COMMAND}"
        )
        yield (
            "device code was not disassembled: tensor-core instructions, operand types and "
            "layouts, block scales, tile, epilogues, result types and spill instructions are "
            f"unchecked ({why})"
        )


def _load_devices(header: Header) -> tuple[list[DeviceProfile], list[Finding]]:
    profiles: list[DeviceProfile] = []
    findings: list[Finding] = []
    for name in header.devices if header.target.arch != CPU else ():
        try:
            profile = load_profile(name)
        except TargetError as error:
            findings.append(Check.DEVICE_PROFILE.finding(str(error)))
            continue
        profiles.append(profile)
        if not header.target.runs_on(profile.capability):
            major, minor = profile.capability
            message = (
                f"device {profile.name} has compute capability {major}.{minor} and cannot run "
                f"target {header.target.arch}"
            )
            findings.append(Check.DEVICE_PROFILE.finding(message))
    return profiles, findings
