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

    def unseen(self, message: str) -> Finding:
        """The payload does not show what is checked, as kernels of known providers do."""
        return Finding(check=self, message=message, is_unseen=True)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check that a bundle or one of its kernels fails.

    Attributes:
        kernel: Id of the kernel; None if the bundle as a whole is meant, and until `verify_bundle`
            has filled it in.
        is_unseen: Whether the payload contradicts nothing, but does not show what is checked. Of a
            kernel of a provider that `verify` does not know, that is no finding but a note.
    """

    check: Check
    message: str
    kernel: str | None = None
    is_unseen: bool = False
