"""Presents a bundled kernel as an Inductor choice, timed by Inductor and called by its code.

Every generated call falls back to stock torch's call (`StockCall`) if the kernel cannot compute.
Generated Python must run without this package, so there the fallback is an expression in the
module's text.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import ir
from torch._inductor import select_algorithm as autotuning
from torch._inductor.codegen import wrapper as code_lines
from torch._inductor.virtualized import V

from ...gemm.aten import OPERATORS, kernel_order
from ...gemm.epilogues import Activation, Epilogue, WeightOrder
from ...gemm.roles import extra_roles
from ...reporting.counters import COUNTERS
from ...reporting.events import kernel_failed
from .. import report
from ..codegen import cpp, operator_loading
from ..reading import is_alternative

if TYPE_CHECKING:
    from ...gemm.problem import Signature
    from ..offers import Offer

_log = logging.getLogger(__name__)


def _activation_fallback(activation: Activation) -> str:
    """Returns the code for addmm and an activation, rounding in between as eager does."""
    row = activation.row
    if row.commutes_with_rounding:
        return f"lambda *a, out: torch.addmm(*a, out=out).{row.torch_name}_()"
    options = "".join(f", {name}={value!r}" for name, value in row.torch_options.items())
    call = f"torch.nn.functional.{row.torch_name}(torch.addmm(*a){options})"
    return f"lambda *a, out: out.copy_({call})"


def _gate_fallback(epilogue: Epilogue, op: str) -> str:
    """Returns the code for a GEMM and a gate, rounding after each operation as eager does."""
    gate = epilogue.gate
    assert gate is not None
    row = gate.row.activation.row
    options = "".join(f", {name}={value!r}" for name, value in row.torch_options.items())
    limit, alpha = gate.row.limit, gate.row.alpha
    if limit is not None:
        joined = (
            f"(u.clamp(-{limit}, {limit}) + 1) * "
            f"(lambda g: g * torch.sigmoid(g * {alpha}))(g.clamp(max={limit}))"
        )
    else:
        joined = f"torch.nn.functional.{row.torch_name}(g{options}) * u"
    if epilogue.order is WeightOrder.HALVES:
        pair = f"*torch.{op}(*a).chunk(2, -1)"
    else:
        pair = f"*torch.{op}(*a).unflatten(-1, (-1, 2)).unbind(-1)"
    return f"lambda *a, out: out.copy_((lambda g, u: {joined})({pair}))"


@dataclass(frozen=True, kw_only=True)
class StockCall:
    """ATen call that a kernel replaces.

    Attributes:
        op: ATen's operator name.
        gemm: Problem key, for reports.
        inputs: Inductor nodes of the tensors, in the order of the operator's schema.
        layout: Inductor layout of the result.
        options: Other arguments.
        activation: Activation that follows, if the kernel applies it.
        gated: Gated epilogue that follows, if the kernel applies it.
        is_split: True if the kernel computes only the product, into fp32, and torch adds the rest.
        cpp_kernel_name, op_overload: Copied from Inductor's choice.
    """

    op: str
    gemm: str
    inputs: Sequence[Any]
    layout: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    activation: Activation | None = None
    gated: Epilogue | None = None
    is_split: bool = False
    cpp_kernel_name: str | None = None
    op_overload: Any = None

    @classmethod
    def of_choice(cls, op: str, gemm: str, choice: Any, *, is_split: bool = False) -> StockCall:
        """Builds the call of Inductor's choice."""
        return cls(
            op=op,
            gemm=gemm,
            inputs=choice.input_nodes,
            layout=choice.layout,
            options=choice.kwargs,
            is_split=is_split,
            cpp_kernel_name=choice.choice.cpp_kernel_name,
            op_overload=choice.choice.op_overload,
        )

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the inputs that a kernel takes, in the kernel's order."""
        return kernel_order(self.op, len(self.inputs))

    @property
    def fallback(self) -> str:
        """Code of a function that computes the call, for a module that has imported torch."""
        if self.activation is not None:
            return _activation_fallback(self.activation)
        if self.gated is not None:
            return _gate_fallback(self.gated, self.op)
        return OPERATORS[self.op].stock_call

    def name_with(self, offer: Offer) -> str:
        """Returns a kernel's name for this call, in generated code and in Inductor's tables."""
        name = self.op.lstrip("_")
        if self.activation is not None:
            name += f"_{self.activation.value}"
        if self.gated is not None:
            name += f"_{self.gated.name}"
        return f"nvgemm_{name}{'_split' if self.is_split else ''}_{offer.kernel.id[:12]}"


def fix_strides(node: Any) -> None:
    """Fixes a node's strides, which Inductor may still choose otherwise."""
    is_view = isinstance(getattr(node, "data", node), ir.ReinterpretView)
    if not is_view and isinstance(node.get_layout(), ir.FlexibleLayout):
        node.freeze_layout()


def gemm_choices(stock: StockCall, offers: Sequence[Offer]) -> list[GemmChoice]:
    """Builds a choice for each kernel, and fixes the strides of their operands."""
    if offers:
        for node in stock.inputs:
            fix_strides(node)
    return [GemmChoice(stock, offer) for offer in offers]


def _benchmarked(
    *tensors: torch.Tensor,
    kernel: str,
    order: tuple[int, ...],
    split: bool,
    out: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Runs the kernel for Inductor's timing, never the fallback."""
    from ...launch.select import load_kernel

    a, b, *extras = (tensors[index] for index in order)
    if not split:
        load_kernel(kernel).launch(a, b, out, *extras)
        return out
    product = torch.empty_like(out, dtype=torch.float32)
    load_kernel(kernel).launch(a, b, product)
    return torch.add(product, *extras, out=out)


_CHOICE = autotuning.ExternKernelChoice(_benchmarked, name="nvgemm_aot")
"""Inductor finds the function by this name, also in its autotuning processes."""


class BundledChoice(autotuning.ExternKernelCaller):  # type: ignore[misc]
    """Choice that runs bundled kernels."""


class GemmChoice(BundledChoice):
    """Bundled kernel as an Inductor choice."""

    def __init__(self, stock: StockCall, offer: Offer) -> None:
        # Inductor's timing cache uses these as its key.
        kwargs = {
            **stock.options,
            "kernel": offer.kernel.id,
            "order": stock.order,
            "split": stock.is_split,
        }
        super().__init__(_CHOICE, stock.inputs, stock.layout, kwargs)
        self.stock = stock
        self.offer = offer
        self.name = stock.name_with(offer)
        self.description = offer.kernel.operator

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        """Returns a launch's milliseconds, or infinity if the kernel cannot be launched."""
        try:
            with COUNTERS.spending("timing"):
                return float(super().benchmark(*args, out=out))
        except Exception as error:
            log_failed_timing(self.name, self.offer.kernel.id, self.offer.origin, error)
            return math.inf

    def output_node(self) -> Any:
        """Returns the node that Inductor schedules if this choice wins."""
        return ir.TensorBox.create(GemmNode(self.stock, self.offer))

    def __str__(self) -> str:
        return f"GemmChoice({self.name}, {self.offer.kernel.operator})"


_known_failures: set[tuple[str, type[Exception]]] = set()
"""Wheels and error types already logged."""


def log_failed_timing(name: str, kernel_id: str, origin: str, error: Exception) -> None:
    """Counts a kernel that failed while its choice was timed, and logs the reason.

    Args:
        name: Choice name.
        kernel_id: The choice's kernel.
        origin: Source of the kernel, such as a wheel.
        error: The failure.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        kernel_failed(kernel_id, str(error))
    failure = (origin, type(error))
    is_known = operator_loading.was_logged(error) or failure in _known_failures
    _known_failures.add(failure)
    level = logging.DEBUG if is_known else logging.WARNING
    _log.log(level, "%s from %s is not offered: %s", name, origin, error)


def header(module: str, function: str, parameters: str, origins: str) -> str:
    """Returns a generated module's first lines, which import a function or fall back to ATen.

    Args:
        module: Module that defines the function.
        function: Its name there. The generated module adds the prefix ``nvgemm_aot_``.
        parameters: Names of the parameters after ``aten``.
        origins: Expression over these parameters that gives the kernels' origins, for the warning.
    """
    return f"""
try:
    from {module} import {function} as nvgemm_aot_{function}
except Exception:
    def nvgemm_aot_{function}(aten, {parameters}):
        import logging
        log = logging.getLogger("nvgemm_runtime.launch.compiled")
        logged = log.__dict__.setdefault("nvgemm_aot_logged", set())
        for origin in sorted({{{origins}}} - logged):
            logged.add(origin)
            log.warning("nvgemm-aot is not installed: GEMMs compiled for %s run on ATen", origin)
        return aten
"""


_HEADER = header(
    "nvgemm_runtime.launch.compiled", "gemm", "kernel_id, origin, order, split", "origin"
)


class CallNode(ir.ExternKernelOut):  # type: ignore[misc]
    """Call that replaces ATen's, in the graph from which Inductor generates code."""

    def __init__(self, stock: StockCall, name_in_code: str) -> None:
        self.stock = stock
        self.name_in_code = name_in_code
        super().__init__(
            layout=stock.layout,
            inputs=stock.inputs,
            python_kernel_name=name_in_code,
            cpp_kernel_name=stock.cpp_kernel_name,
            op_overload=stock.op_overload,
            kwargs=dict(stock.options),
        )

    def codegen(self, wrapper: Any) -> None:
        """Writes the call, and its definitions at the start of the module."""
        in_cpp = V.graph.cpp_wrapper
        if in_cpp and (self.output_view is not None or not _is_known_cpp(wrapper)):
            # An untested way of generating C++ gets the stock call.
            super().codegen(wrapper)
            return
        if not is_alternative():
            self.report_use()
        if not in_cpp:
            define_in_python(wrapper, self.name_in_code, *self.python_definition())
            super().codegen(wrapper)
            return
        operator_loading.try_to_load_operators()  # for code that runs in this process
        self._define_in_cpp(_module_wrapper(wrapper))
        self.codegen_comment(wrapper)
        wrapper.writeline(_CppGemmLine(wrapper, self))

    def _define_in_cpp(self, root: Any) -> None:
        """Defines the call's variable and its type in the generated file, once."""
        if _add_name(root, cpp.HEADER):
            root.header.splice(cpp.HEADER)
        if _add_name(root, self.name_in_code):
            root.header.splice(self.cpp_declaration())

    def report_use(self) -> None:
        """Reports that the call was generated."""
        raise NotImplementedError

    def python_definition(self) -> tuple[str, str]:
        """Returns a generated module's first lines, and an expression for the call's function."""
        raise NotImplementedError

    def cpp_declaration(self) -> str:
        """Returns the definition of the call's variable in a generated file."""
        raise NotImplementedError

    def cpp_condition(self, operands: cpp.Operands) -> str:
        """Returns a C++ condition that computes the call, and is false if it cannot."""
        raise NotImplementedError

    @property
    def signature(self) -> Signature:
        """Signature of the call's kernels."""
        raise NotImplementedError


def define_in_python(wrapper: Any, name: str, first_lines: str, expression: str) -> None:
    """Defines a call's function in the generated module, once."""
    root = _module_wrapper(wrapper)
    if _add_name(root, first_lines):
        root.imports.splice(first_lines)
    if _add_name(root, name):
        root.imports.writeline(f"{name} = {expression}")


class GemmNode(CallNode):
    """Call of a bundled kernel."""

    def __init__(self, stock: StockCall, offer: Offer) -> None:
        self.offer = offer
        super().__init__(stock, stock.name_with(offer))

    def report_use(self) -> None:
        """Reports the kernel."""
        report.used(self.stock.gemm, self.name_in_code, self.offer.kernel.id)

    def python_definition(self) -> tuple[str, str]:
        """Implements `CallNode.python_definition`."""
        stock, offer = self.stock, self.offer
        kernel = f"{offer.kernel.id!r}, {offer.origin!r}, {stock.order}, {stock.is_split}"
        return _HEADER, f"nvgemm_aot_gemm({stock.fallback}, {kernel})"

    def cpp_declaration(self) -> str:
        """Implements `CallNode.cpp_declaration`."""
        return cpp.declaration(self.name_in_code)

    def cpp_condition(self, operands: cpp.Operands) -> str:
        """Implements `CallNode.cpp_condition`."""
        kernel = self.offer.kernel.id
        return cpp.condition(self.name_in_code, kernel, self.offer.origin, operands)

    @property
    def signature(self) -> Signature:
        """Signature of the kernel."""
        return self.offer.kernel.signature


_CPP_WRAPPERS = ("CppWrapperCpu", "CppWrapperGpu")


def _is_known_cpp(wrapper: Any) -> bool:
    """Returns True for a C++ wrapper class that was tested."""
    return type(wrapper).__name__ in _CPP_WRAPPERS


class _CppGemmLine(code_lines.ExternKernelOutLine):  # type: ignore[misc]
    """Stock ATen call that runs only if the kernel did not compute."""

    def codegen(self, code: Any) -> None:
        node = self.node
        tensors = [V.graph.wrapper_code.val_to_arg_str(input_node) for input_node in node.inputs]
        a, b, *extras = (tensors[index] for index in node.stock.order)
        roles = extra_roles(node.signature)
        operands = cpp.Operands(
            a=a,
            b=b,
            out=node.codegen_reference(),
            extras={role.value: tensor for role, tensor in zip(roles, extras)},
        )
        condition = node.cpp_condition(operands)
        self.wrapper.writeline(f"if (!{condition}) {{")
        super().codegen(code)
        self.wrapper.writeline("}")


def _module_wrapper(wrapper: Any) -> Any:
    """Returns the whole module's wrapper. Subgraphs have wrappers of their own."""
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    return wrapper


def _add_name(root: Any, text: str) -> bool:
    """Records a header or a name in a module. Returns True if it is new there."""
    names: set[str] = root.__dict__.setdefault("nvgemm_aot_names", set())
    if text in names:
        return False
    names.add(text)
    return True
