"""Inspects a kernel in a bundle: evidence in its payload, and differences from its entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.target import CPU, Target

from ..targets.profile import DeviceProfile
from .device.cubin import RESERVED_SHARED_BYTES, Cubin, check_cubin, read_cubins
from .device.disassembler import Disassembler, DisassemblyError
from .device.kernel_design import KNOWN_PROVIDERS, check_design
from .device.sass import Disassembly, check_disassembly, read_disassembly
from .findings import Check, Finding
from .host.elf import MalformedElfError
from .host.host_object import check_host_object, read_host_object
from .host.launch_code import launch_clusters, launch_shared_bytes
from .host.launch_signature import LauncherText, check_call, check_interface, read_launcher_text

NOT_DISASSEMBLED = "not disassembled"
NO_DEVICE_CODE = "no device code"


@dataclass(frozen=True, kw_only=True)
class KernelEvidence:
    """Evidence about a kernel. A field is None or empty if the payload does not show it.

    Attributes:
        id: Payload sha256, in hex.
        operator, signature: Operator and signature in its entry.
        architecture: Architecture by the device code's flags, e.g. ``sm_90a``; a family's code has
            its first member's flags: ``sm_100`` for ``sm_100f``.
        compiled_for: Architecture passed to the device compiler, e.g. ``sm_100f``.
        registers: Registers per thread, at launch.
        threads: Threads per block.
        static_shared_bytes: Static shared memory per block, without CUDA's reserved part.
        dynamic_shared_bytes: Dynamic shared memory per block that the launcher requests.
        local_bytes: Local memory per thread: stack and spills.
        instructions: Tensor-core and local-memory instructions with their counts.
        operands: Operands in the launcher's text.
        alignment_bytes: Data alignments that the launcher demands.
        clusters: Cluster dimensions (m, n) that the launcher requests, in thread blocks.
        multiplies: Extents, majors and element types shown by tensor-core instructions.
        disassembled_by: Program and version, or the reason for none: ``not disassembled``, ``no
            device code``.
        unseen: Checks not made for a kernel from an unknown provider, with the reasons.
    """

    id: str
    operator: str
    signature: str
    architecture: str | None
    compiled_for: str | None
    registers: int | None
    threads: int | None
    static_shared_bytes: int | None
    dynamic_shared_bytes: int | None
    local_bytes: int | None
    operands: str | None
    alignment_bytes: tuple[int, ...]
    clusters: tuple[tuple[int, int], ...]
    instructions: dict[str, int]
    multiplies: tuple[str, ...]
    disassembled_by: str
    unseen: tuple[str, ...] = ()


def inspect_kernel(
    kernel: Kernel,
    payload: bytes,
    *,
    target: Target,
    profiles: Sequence[DeviceProfile],
    disassembler: Disassembler | None,
    stated_imports: tuple[str, ...] | None = None,
) -> tuple[KernelEvidence, list[Finding]]:
    """Inspects a kernel's payload, whose digest was checked.

    Without profiles, GPU limits are not checked; without a disassembler, device code is not
    disassembled. ``stated_imports`` are the header's imports, if it states any.

    Returns:
        Evidence, and every failed check. A malformed payload is a finding, not an error.
    """
    on_cpu, platform = target.arch == CPU, target.platform
    code = read_only = b""
    findings = []
    try:
        host = read_host_object(payload)
    except MalformedElfError as error:
        findings.append(Check.HOST_FORMAT.finding(str(error)))
    else:
        code, read_only = host.code, host.read_only
        convention = parse_calling_convention(kernel.calling_convention)
        # An unknown convention names no export; `check_call` reports it.
        exported = convention.symbol if convention is not None else None
        findings += check_host_object(host, exported, platform=platform, on_cpu=on_cpu)
        findings += _check_stated_imports(stated_imports, host.imports)
    if on_cpu:  # host code alone, without a device launcher
        findings += check_call(kernel)
        no_text = LauncherText(operands="", alignment_bytes=frozenset())
        return _evidence(kernel, None, frozenset(), no_text, (), [], NO_DEVICE_CODE), findings
    text = read_launcher_text(read_only)
    findings += check_interface(kernel, text)
    cubins: tuple[Cubin, ...] = ()
    try:
        cubins = read_cubins(payload)
    except MalformedElfError as error:
        findings.append(Check.DEVICE_FORMAT.finding(str(error)))
    clusters = launch_clusters(code, platform)
    findings += check_design(kernel, cubins, profiles=profiles, clusters=clusters)
    launch_bytes = launch_shared_bytes(code, platform)
    listings: list[Disassembly] = []
    for cubin in cubins:
        findings += check_cubin(cubin, target=target, profiles=profiles, launch_bytes=launch_bytes)
        if disassembler is None:
            continue
        try:
            listing = read_disassembly(disassembler.disassemble(cubin.content))
        except DisassemblyError as error:
            findings.append(Check.DISASSEMBLY.finding(str(error)))
            continue
        listings.append(listing)
        findings += check_disassembly(
            listing,
            target=target,
            signature=kernel.signature,
            design=kernel.design,
            is_deterministic=kernel.is_deterministic,
            provider=kernel.provider,
        )
    by = str(disassembler) if listings else NOT_DISASSEMBLED
    unseen = [
        finding
        for finding in findings
        if finding.is_unseen and kernel.provider not in KNOWN_PROVIDERS
    ]
    evidence = replace(
        _evidence(kernel, launch_bytes, clusters, text, cubins, listings, by),
        unseen=tuple(f"{finding.check.value}: {finding.message}" for finding in unseen),
    )
    return evidence, [finding for finding in findings if finding not in unseen]


def _check_stated_imports(
    stated: tuple[str, ...] | None, actual: tuple[str, ...]
) -> Iterator[Finding]:
    if stated is not None and stated != actual:
        missing, extra = sorted({*actual} - {*stated}), sorted({*stated} - {*actual})
        yield Check.IMPORTS.finding(
            "imports must be the payload's undefined symbols: missing "
            f"{', '.join(missing) or 'none'}, extra {', '.join(extra) or 'none'}"
        )


def _evidence(
    kernel: Kernel,
    launch_bytes: int | None,
    clusters: frozenset[tuple[int, int]],
    text: LauncherText,
    cubins: tuple[Cubin, ...],
    listings: list[Disassembly],
    disassembled_by: str,
) -> KernelEvidence:
    functions = [function for cubin in cubins for function in cubin.kernels]
    instructions: Counter[str] = Counter()
    for listing in listings:
        instructions.update(listing.tensor_core)
        instructions.update(listing.local_memory)
    shared = max((function.shared_bytes for function in functions), default=None)
    return KernelEvidence(
        id=kernel.id,
        operator=kernel.operator,
        signature=kernel.signature.key,
        architecture=", ".join(sorted({cubin.architecture for cubin in cubins})) or None,
        compiled_for=", ".join(sorted({c.compiled_for for c in cubins if c.compiled_for})) or None,
        registers=max((function.registers for function in functions), default=None),
        threads=max((function.threads or 0 for function in functions), default=0) or None,
        static_shared_bytes=None if shared is None else max(shared - RESERVED_SHARED_BYTES, 0),
        dynamic_shared_bytes=launch_bytes,
        local_bytes=max((function.local_bytes for function in functions), default=None),
        operands=text.operands or None,
        alignment_bytes=tuple(sorted(text.alignment_bytes)),
        clusters=tuple(sorted(clusters)),
        instructions=dict(sorted(instructions.items())),
        multiplies=tuple(
            sorted({str(item) for listing in listings for item in listing.multiplies})
        ),
        disassembled_by=disassembled_by,
    )
