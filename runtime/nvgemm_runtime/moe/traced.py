"""Experts in torch.compile graphs, with kernels as operators.

`experts` and `routed_experts` are an operator each for Dynamo. AOTAutograd replaces it with its
computation. Products with a gate, and the products that such kernels read, then become operators
that launch a kernel if installed bundles have one. Otherwise they are plain products and operators,
which Inductor fuses as usual. So Dynamo's graphs do not depend on installed bundles. Torch's later
caches do: if the plug-in is active, `nvgemm_runtime.inductor.configuration.cache_key` adds the
bundles to their keys.

Importing this module defines all operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._version import __version__
from . import gated_products, products, row_sums  # noqa: F401  (they define operators)
from .launching import library


def define_whole(
    name: str, operands: str, run: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Defines an operator that traces as ``run``. Returns a function that calls the operator.

    The operator hides the experts' functions from Dynamo. Tracing them took most of a warm start,
    and each had guards to check at every call.

    The operator takes nvgemm-aot's version before its operands, and autocast's dtype as the last
    one. Torch's cache keys get both only from the operator's arguments: autocast's dtype in torch
    2.11, and the version if torch.compile runs without the plug-in.
    """

    def replace(_: str, *arguments: Any) -> torch.Tensor:
        return run(*arguments)

    schema = f"{name}(str version, {operands}, ScalarType? wanted) -> Tensor"
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, replace, "CompositeImplicitAutograd")
    operator: Callable[..., torch.Tensor] = getattr(torch.ops.nvgemm_moe, name)

    def call(*arguments: Any) -> torch.Tensor:
        return operator(__version__, *arguments)

    return call


def is_traced_whole() -> bool:
    """Returns True while torch.compile traces, except under torch.export.

    Programs with any version of nvgemm-aot read and run an exported graph, and torch keeps
    operators in it that should be replaced.
    """
    # Dynamo in torch 2.11 treats is_exporting() as True whenever it traces.
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_compiling() and not is_exporting
