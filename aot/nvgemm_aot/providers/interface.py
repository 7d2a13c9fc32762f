"""Names that an external provider may import, besides `cute_dsl.__all__`.

docs/develop/providers.md is the guide, with the compatibility promise for these names.
"""

from __future__ import annotations

from nvgemm_runtime.bundle.calling_convention import PLAIN, CallingConvention
from nvgemm_runtime.bundle.format import ClusterLimit, KernelDesign
from nvgemm_runtime.bundle.workspace import TileWorkspace
from nvgemm_runtime.errors import CompileError, ToolchainError
from nvgemm_runtime.gemm.epilogues import Activation, Epilogue
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, extra_roles, role_dtype, role_shape, roles
from nvgemm_runtime.gemm.support import unsupported
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.gemm.types import ScaleRecipe

from ..targets import BuildTarget
from ..targets.profile import DeviceProfile, Fact
from .base import (
    CLC,
    DYNAMIC_PERSISTENT,
    INTERFACE_VERSION,
    ONE_TILE,
    SCHEDULERS,
    STATIC_PERSISTENT,
    BlockShape,
    Candidate,
    Enumeration,
    Provider,
    Rejection,
    RuntimeModel,
)
from .cute_dsl.cute_setup import installed_versions
from .cute_dsl.kept_ptx import keep_ptx
from .discovery import GROUP
from .heuristics.estimates import matmul_heuristics

__all__ = [
    "CLC",
    "DYNAMIC_PERSISTENT",
    "GROUP",
    "INTERFACE_VERSION",
    "ONE_TILE",
    "PLAIN",
    "SCHEDULERS",
    "STATIC_PERSISTENT",
    "Activation",
    "BlockShape",
    "BuildTarget",
    "CallingConvention",
    "Candidate",
    "ClusterLimit",
    "CompileError",
    "DType",
    "DeviceProfile",
    "Enumeration",
    "Epilogue",
    "Fact",
    "KernelDesign",
    "Layout",
    "Op",
    "Problem",
    "Provider",
    "Rejection",
    "Role",
    "RuntimeModel",
    "ScaleRecipe",
    "Signature",
    "Target",
    "TileWorkspace",
    "ToolchainError",
    "extra_roles",
    "installed_versions",
    "keep_ptx",
    "matmul_heuristics",
    "role_dtype",
    "role_shape",
    "roles",
    "unsupported",
]
