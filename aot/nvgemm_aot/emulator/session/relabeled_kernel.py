"""Kernels' functions for CPU tensors, which launchers receive as CUDA tensors.

Launchers insist on CUDA tensors. The native part registers such a function as a CPU kernel's, and
checks operands as for any kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, MNKL, STREAM, CallingConvention
from nvgemm_runtime.gemm.problem import Signature

from ..machine.global_memory import Region
from .ffi_structs import CUDA, FUNCTION, AnyStruct, TensorStruct, set_raised
from .kernel_regions import RESULTS, kernel_regions
from .row_gaps import RowGaps

Calling = Callable[[tuple[Region, ...]], AbstractContextManager[object]]
"""Entered around a call, with the memory that it may touch. Its exceptions are the call's."""


class RelabeledKernel:
    """A payload's function on CPU tensors, which it receives as CUDA tensors of one device."""

    def __init__(
        self,
        address: int,
        *,
        signature: Signature,
        convention: CallingConvention,
        clusters: int,
        ordinal: int,
        calling: Calling,
    ) -> None:
        """Wraps a function.

        Args:
            address: The payload's function.
            signature: The kernel's signature.
            convention: Its calling convention.
            clusters: Clusters that run at once, for conventions with that parameter.
            ordinal: The emulated device's.
            calling: Entered around each call.
        """
        self._launcher = FUNCTION(address)
        self._signature = signature
        self._parameters = convention.parameters
        self._clusters = clusters
        self._ordinal = ordinal
        self._calling = calling
        self._function = FUNCTION(self._call)

    @property
    def address(self) -> int:
        """Address of the wrapping function; valid while this object lives."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _call(
        self,
        handle: int | None,
        arguments: ctypes._Pointer[AnyStruct],
        count: int,
        result: ctypes._Pointer[AnyStruct],
    ) -> int:
        try:
            regions = kernel_regions(self._signature, self._parameters, arguments[:count])
            relabeled = (AnyStruct * count)(*arguments[:count])
            tensors = [self._relabel(*each) for each in zip(self._parameters, relabeled)]
            results = [
                RowGaps(parameter, tensor)
                for parameter, tensor in zip(self._parameters, tensors)
                if tensor is not None and parameter in RESULTS
            ]
            with self._calling(regions):
                status: int = self._launcher(handle, relabeled, count, result)
                if status == 0:
                    for gaps in results:
                        gaps.check()
            return status
        except BaseException as failure:  # the native part, written in C++, must see an error
            set_raised(type(failure).__name__, str(failure))
            return -1

    def _relabel(self, parameter: str, argument: AnyStruct) -> TensorStruct | None:
        """Makes a tensor argument a CUDA tensor, and returns it."""
        if parameter == CLUSTERS:
            argument.value = self._clusters
        if parameter in (CLUSTERS, MNKL, STREAM) or parameter.endswith("*"):
            return None
        tensor = TensorStruct.from_buffer_copy(TensorStruct.from_address(argument.value))
        tensor.device_type, tensor.device = CUDA, self._ordinal
        argument.value = ctypes.addressof(tensor)
        return tensor
