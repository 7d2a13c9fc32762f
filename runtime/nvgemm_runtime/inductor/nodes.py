"""Calls of bundled kernels in the code that Inductor generates, in Python and in C++.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor import config, ir
from torch._inductor.codegen import wrapper as code_lines
from torch._inductor.virtualized import V

from ..gemm.roles import extra_roles
from . import cpp, packages, report
from .alternatives import is_alternative

if TYPE_CHECKING:
    from .fallbacks import StockCall
    from .offers import Offer

_HEADER = """
try:
    from nvgemm_runtime.launch.compiled import gemm as nvgemm_aot_gemm
except Exception:
    def nvgemm_aot_gemm(aten, kernel_id, origin, order, split):
        import logging
        log = logging.getLogger("nvgemm_runtime.launch.compiled")
        logged = log.__dict__.setdefault("nvgemm_aot_logged", set())
        if origin not in logged:
            logged.add(origin)
            log.warning("nvgemm-aot is not installed: GEMMs compiled for %s run on ATen", origin)
        return aten
"""
"""What a generated module starts with: the kernels by their ids, or ATen where we are gone."""


def name_of(stock: StockCall, offer: Offer) -> str:
    """Name of a kernel in generated code and in Inductor's tables, where it computes a call."""
    return f"nvgemm_{stock.name}_{offer.kernel.id[:12]}"


class GemmNode(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of a bundled kernel in the graph that Inductor generates code from."""

    def __init__(self, stock: StockCall, offer: Offer) -> None:
        self.stock = stock
        self.offer = offer
        self.name_in_code = name_of(stock, offer)
        super().__init__(
            layout=stock.layout,
            inputs=stock.inputs,
            python_kernel_name=self.name_in_code,
            cpp_kernel_name=stock.cpp_kernel_name,
            op_overload=stock.op_overload,
            kwargs=dict(stock.options),
        )

    def codegen(self, wrapper: Any) -> None:
        """Write the call, and what it needs at the start of the module."""
        if not is_alternative():
            report.used(self.stock.gemm, self.name_in_code, self.offer.kernel.id)
        if not V.graph.cpp_wrapper:
            _declare(wrapper, self)
            super().codegen(wrapper)
        elif self.output_view is None and _is_known_cpp(wrapper):
            packages.load_operators()  # so that the code finds them when it runs here
            _declare_cpp(wrapper, self)
            self.codegen_comment(wrapper)
            wrapper.writeline(_CppGemmLine(wrapper, self))
        else:
            # A way of generating C++ that was not tried: it gets the stock call.
            super().codegen(wrapper)


_CPP_WRAPPERS = ("CppWrapperCpu", "CppWrapperGpu")


def _is_known_cpp(wrapper: Any) -> bool:
    """Whether generated C++ is of a kind that was tried: for this platform, linked with torch."""
    aoti = config.aot_inductor
    elsewhere = getattr(aoti, "cross_target_platform", None)
    alone = getattr(getattr(config, "aot_inductor_mode", None), "compile_standalone", False)
    return type(wrapper).__name__ in _CPP_WRAPPERS and not elsewhere and not alone


class _CppGemmLine(code_lines.ExternKernelOutLine):  # type: ignore[misc]
    """The stock ATen call, under the condition that the kernel did not do it."""

    def codegen(self, code: Any) -> None:
        node = self.node
        tensors = [V.graph.wrapper_code.val_to_arg_str(one) for one in node.inputs]
        a, b, *extras = (tensors[place] for place in node.stock.order)
        roles = extra_roles(node.offer.kernel.signature)
        condition = cpp.condition(
            name=node.name_in_code,
            kernel_id=node.offer.kernel.id,
            origin=node.offer.origin,
            a=a,
            b=b,
            out=node.codegen_reference(),
            extras={role.value: tensor for role, tensor in zip(roles, extras)},
        )
        self.wrapper.writeline(f"if (!{condition}) {{")
        super().codegen(code)
        self.wrapper.writeline("}")


def _declare(wrapper: Any, node: GemmNode) -> None:
    """Have the generated module define the kernel's function, once."""
    root = _root(wrapper)
    name, offer = node.name_in_code, node.offer
    if _is_first(root, ""):
        root.imports.splice(_HEADER)
    if _is_first(root, name):
        known = f"{offer.kernel.id!r}, {offer.origin!r}, {node.stock.order}, {node.stock.is_split}"
        root.imports.writeline(f"{name} = nvgemm_aot_gemm({node.stock.expression}, {known})")


def _declare_cpp(wrapper: Any, node: GemmNode) -> None:
    """Have the generated file define the kernel's variable, once."""
    root = _root(wrapper)
    if _is_first(root, ""):
        root.header.splice(cpp.HEADER)
    if _is_first(root, node.name_in_code):
        root.header.splice(cpp.declaration(node.name_in_code))


def _root(wrapper: Any) -> Any:
    """The wrapper of the whole module, of which subgraphs have wrappers of their own."""
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    return wrapper


def _is_first(root: Any, name: str) -> bool:
    """Whether a module does not define a name yet; from now on it does."""
    defined: set[str] = root.__dict__.setdefault("nvgemm_aot_names", set())
    if name in defined:
        return False
    defined.add(name)
    return True
