"""Makes compiled launchers report CUDA errors to TVM-FFI themselves.

cutlass-dsl 4.8.1 has a launcher call a reporting function that the runtime library exports from 4.7
on. Serving engines pin 4.5 and 4.6, where no kernel with that call loads.
"""

from __future__ import annotations

from typing import Any

_REPORT = "CuteDSLRT_TVMFFISetRaisedCudaError"
"""Function that compiled launchers call. Its arguments are TVM-FFI's raising function and the CUDA
error code; the launcher then returns."""


def raise_cuda_errors_by_name(module: Any) -> None:
    """Makes a compiled launcher raise errors such as ``CUDA Error: cudaErrorInvalidValue``.

    Text and code are those that cutlass-dsl 4.5.2 makes. All library releases from 4.5.2 export the
    function that names an error, and the module declares it. A module without the call stays the
    same.
    """
    from cutlass._mlir import ir
    from cutlass._mlir.dialects import llvm
    from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import TVMFFIBuilder

    calls: list[Any] = []

    def collect(operation: Any) -> Any:
        if operation.name == "llvm.call" and _callee(operation) == _REPORT:
            calls.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context, ir.Location.unknown():
        module.operation.walk(collect)
        for call in calls:
            builder: Any = TVMFFIBuilder()
            builder.module = module
            with ir.InsertionPoint(call):
                name = llvm.call(
                    result=builder.ptr_type,
                    callee="cuda_dialect_get_error_name",
                    callee_operands=[call.operands[1]],
                    op_bundle_sizes=[],
                    op_bundle_operands=[],
                )
                builder.raise_error_and_return("RuntimeError", ["CUDA Error: ", name])
            operations = [*call.block.operations]
            for replaced in reversed(operations[operations.index(call) :]):
                replaced.erase()


def _callee(call: Any) -> str | None:
    """Returns the called function's name, or None for a call through a pointer."""
    return call.attributes["callee"].value if "callee" in call.attributes else None
