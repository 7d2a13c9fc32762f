"""Looking at one kernel of a bundle: what is in its payload, and what its entry says is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.target import CPU, Target

from ..targets.profile import DeviceProfile
from .cubin import RESERVED_SHARED_BYTES, Cubin, check_cubin, read_cubins
from .disassembler import Disassembler, DisassemblyError
from .elf import MalformedElfError
from .findings import Check, Gap
from .host_object import find_host_gaps
from .kernel_design import check_design
from .launch_code import Launch, read_launch
from .launch_signature import (
    LauncherText,
    check_call,
    check_interface,
    read_launcher_text,
)
from .operator_name import check_operator_name
from .sass import Disassembly, check_disassembly, read_disassembly

NOT_DISASSEMBLED = "not disassembled"
NO_DEVICE_CODE = "no device code"


@dataclass(frozen=True, kw_only=True)
class KernelEvidence:
    """What was seen of one kernel; None and empty where it could not be seen.

    Attributes:
        id: sha256 of the payload, in hex.
        operator: The operator that its entry names.
        signature: Key of the signature that its entry names.
        architecture: Architecture by the flags of the device code, e.g. ``sm_90a``; a family's
            code has the flags of its first member: ``sm_100`` for ``sm_100f``.
        compiled_for: Architecture that the device compiler was told, e.g. ``sm_100f``.
        registers: Registers of a thread at launch.
        threads: Threads of a block.
        static_shared_bytes: Static shared memory of a block, without what CUDA reserves.
        dynamic_shared_bytes: Dynamic shared memory of a block that the launcher asks for.
        local_bytes: Local memory of a thread: stack and spills.
        instructions: Tensor-core and local-memory instructions with their number in the code.
        operands: The operands that the launcher says it takes.
        alignment_bytes: Alignments that the launcher demands of their data.
        clusters: Cluster dimensions (m, n) that the launcher asks for, in thread blocks.
        multiplies: Extents, majors and element types that the tensor-core instructions show.
        disassembled_by: The program and its version, or why there is none: ``not disassembled``,
            ``no device code``.
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


def inspect_kernel(
    kernel: Kernel,
    payload: bytes,
    *,
    target: Target,
    profile: DeviceProfile | None,
    disassembler: Disassembler | None,
) -> tuple[KernelEvidence, list[Gap]]:
    """Look at one kernel.

    Args:
        kernel: Its entry.
        payload: Its shared object, whose digest was checked.
        target: What the bundle is for.
        profile: Limits of the GPU; None to check none.
        disassembler: What to look at device code with; None to leave that out.

    Returns:
        What was seen, and what does not hold. A malformed payload is a gap, never an error.
    """
    if target.arch == CPU:
        return _inspect_cpu_kernel(kernel, payload, target)
    text = read_launcher_text(payload)
    gaps = [*check_interface(kernel, text), *_check_host(kernel, payload, target)]
    launch = read_launch(payload)
    cubins: tuple[Cubin, ...] = ()
    try:
        cubins = read_cubins(payload)
    except MalformedElfError as error:
        gaps.append(Gap(check=Check.DEVICE_FORMAT, message=str(error)))
    gaps += check_operator_name(kernel, cubins)
    gaps += check_design(kernel.design, cubins, profile=profile, clusters=launch.clusters)
    codes: list[Disassembly] = []
    for cubin in cubins:
        gaps += check_cubin(cubin, target=target, profile=profile, launch_bytes=launch.shared_bytes)
        if disassembler is None:
            continue
        try:
            code = read_disassembly(disassembler.disassemble(cubin.content))
        except DisassemblyError as error:
            gaps.append(Gap(check=Check.DISASSEMBLY, message=str(error)))
            continue
        codes.append(code)
        gaps += check_disassembly(
            code, target=target, signature=kernel.signature, design=kernel.design
        )
    by = str(disassembler) if codes else NOT_DISASSEMBLED
    return _evidence(kernel, launch, text, cubins, codes, by), gaps


def _inspect_cpu_kernel(
    kernel: Kernel, payload: bytes, target: Target
) -> tuple[KernelEvidence, list[Gap]]:
    """Look at a kernel that is host code alone: what is shown of launchers it does not have."""
    gaps = [*check_call(kernel), *_check_host(kernel, payload, target)]
    nothing = Launch(shared_bytes=None, clusters=frozenset())
    silent = LauncherText(operands="", alignment_bytes=frozenset())
    return _evidence(kernel, nothing, silent, (), [], NO_DEVICE_CODE), gaps


def _check_host(kernel: Kernel, payload: bytes, target: Target) -> list[Gap]:
    convention = parse_calling_convention(kernel.calling_convention)
    # An unknown one is a gap of its own; what such a kernel exports, nobody can say.
    exported = convention.symbol if convention is not None else None
    on_cpu = target.arch == CPU
    return [*find_host_gaps(payload, exported, platform=target.platform, on_cpu=on_cpu)]


def _evidence(
    kernel: Kernel,
    launch: Launch,
    text: LauncherText,
    cubins: tuple[Cubin, ...],
    codes: list[Disassembly],
    disassembled_by: str,
) -> KernelEvidence:
    functions = [function for cubin in cubins for function in cubin.kernels]
    instructions: Counter[str] = Counter()
    for code in codes:
        instructions.update(code.tensor_core)
        instructions.update(code.local_memory)
    shared = max((function.shared_bytes for function in functions), default=None)
    return KernelEvidence(
        id=kernel.id,
        operator=kernel.operator,
        signature=kernel.signature.key,
        architecture=", ".join(sorted({cubin.architecture for cubin in cubins})) or None,
        compiled_for=", ".join(sorted({cubin.compiled_for for cubin in cubins})) or None,
        registers=max((function.registers for function in functions), default=None),
        threads=max((function.threads or 0 for function in functions), default=0) or None,
        static_shared_bytes=None if shared is None else max(shared - RESERVED_SHARED_BYTES, 0),
        dynamic_shared_bytes=launch.shared_bytes,
        local_bytes=max((function.local_bytes for function in functions), default=None),
        operands=text.operands or None,
        alignment_bytes=tuple(sorted(text.alignment_bytes)),
        clusters=tuple(sorted(launch.clusters)),
        instructions=dict(sorted(instructions.items())),
        multiplies=tuple(sorted({str(item) for code in codes for item in code.multiplies})),
        disassembled_by=disassembled_by,
    )
