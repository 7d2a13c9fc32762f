"""The names of the checks, and what a failed check reports."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Check(str, enum.Enum):
    """What is checked. Reports show these names, which stay the same across releases."""

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
        """This check fails: what was observed, against what is allowed."""
        return Finding(check=self, message=message)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check that a bundle or one of its kernels fails.

    Attributes:
        kernel: Id of the kernel; None if the bundle as a whole is meant, and until `verify_bundle`
            has filled it in.
    """

    check: Check
    message: str
    kernel: str | None = None
