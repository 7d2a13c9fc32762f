"""Check names, and findings for failed checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Check(str, enum.Enum):
    """Check names. Reports show them, and they stay the same across releases."""

    DEVICE_PROFILE = "device-profile"
    IMPORTS = "imports"
    OPERATOR_NAME = "operator-name"
    CALLING_CONVENTION = "calling-convention"
    WORKSPACE = "workspace"
    OPERANDS = "operands"
    ALIGNMENT = "alignment"
    HOST_FORMAT = "host-format"
    HOST_EXPORTS = "host-exports"
    HOST_SYMBOLS = "host-symbols"
    HOST_LIBRARIES = "host-libraries"
    HOST_RELOCATIONS = "host-relocations"
    HOST_STACK = "host-stack"
    HOST_PROCESSOR = "host-processor"
    DEVICE_FORMAT = "device-format"
    ARCHITECTURE = "architecture"
    CUDA_VERSION = "cuda-version"
    REGISTERS = "registers"
    THREADS = "threads"
    SHARED_MEMORY = "shared-memory"
    LOCAL_MEMORY = "local-memory"
    DISASSEMBLY = "disassembly"
    TENSOR_CORE = "tensor-core"
    OPERAND_TYPES = "operand-types"
    OPERAND_LAYOUT = "operand-layout"
    BLOCK_SCALES = "block-scales"
    EPILOGUE = "epilogue"
    RESULT_TYPE = "result-type"
    INSTRUCTION_TILE = "instruction-tile"
    CTAS_PER_TILE = "ctas-per-tile"
    CLUSTER = "cluster"
    SCHEDULER = "scheduler"
    CLUSTER_LIMITS = "cluster-limits"
    SPLITS = "splits"
    DETERMINISM = "determinism"
    DEPENDENT_LAUNCH = "dependent-launch"

    def finding(self, message: str) -> Finding:
        """Returns a finding: the observed value against the allowed one."""
        return Finding(check=self, message=message)

    def unseen(self, message: str) -> Finding:
        """Returns a finding for a payload that lacks evidence, unlike known providers' kernels."""
        return Finding(check=self, message=message, is_unseen=True)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Failed check for a bundle or a kernel in it.

    Attributes:
        kernel: Kernel id; None for the bundle as a whole, and until `verify_bundle` fills it in.
        is_unseen: True if the payload contradicts nothing but lacks the evidence. For a kernel from
            a provider unknown to `verify`, this is a note instead of a finding.
    """

    check: Check
    message: str
    kernel: str | None = None
    is_unseen: bool = False
