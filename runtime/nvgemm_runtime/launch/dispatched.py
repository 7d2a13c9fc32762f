"""Entry point for generated code with dispatch by m.

The table is data in the generated code, looked up in C++. Kernels load as in `compiled.gemm`, with
the same guarantees per kernel: a missing or failing kernel leaves its rows to ATen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..reporting.generated_choices import note_table
from ..settings import is_off
from .compiled import GeneratedCall, launch_first, leave_to_aten, make_call, note_and_preload
from .loading import native
from .loading.fork_locks import ForkLock

if TYPE_CHECKING:
    import torch

_TryDispatch = Callable[..., "bool | int"]
"""Like `nvgemm_runtime.launch.loading.native.Native.try_dispatch`, without the table."""


def dispatched(
    aten: Callable[..., torch.Tensor],
    bounds: Sequence[int],
    kernels: Sequence[str],
    origins: Mapping[str, str],
    order: tuple[int, ...] = (0, 1),
) -> GeneratedCall:
    """Creates a function for generated code to call.

    Args:
        aten: Fallback for the same tensors and options.
        bounds: Ascending first row count for each segment after the first.
        kernels: Kernel id per segment, one more than bounds; empty for ATen.
        origins: Kernel origins by id; see `compiled.gemm`.
        order: Indices of the tensors that a kernel takes, in its order: A, B, then extras.

    NVGEMM_AOT_DEBUG works as in `compiled.gemm`.
    """
    for kernel_id, origin in origins.items():
        note_and_preload(kernel_id, origin)
    return make_call(aten, MeasuredTable(bounds, kernels, origins), order)


class MeasuredTable:
    """Dispatch table, registered at its first call because the native launcher may be missing.

    Arguments are as in `dispatched`.
    """

    name = "dispatch by m"

    def __init__(
        self, bounds: Sequence[int], kernels: Sequence[str], origins: Mapping[str, str]
    ) -> None:
        note_table(bounds, kernels)
        self._ids = tuple(dict.fromkeys(kernel for kernel in kernels if kernel))
        self._bounds = bounds
        self._segments = [
            self._ids.index(kernel) if kernel else native.ATEN_HANDLE for kernel in kernels
        ]
        self._origins = origins
        self._lock = ForkLock()
        self._is_registered = False
        self.compute: _TryDispatch = self._register_and_compute
        self._first_launches: Sequence[Callable[..., bool]] = ()
        self._settles: Sequence[Callable[[int | None], None]] = ()

    def finish(self, done: bool | int, *tensors: torch.Tensor) -> bool:
        """Launches a kernel that has not run here yet; returns False for ATen's rows."""
        return done is not False and self._first_launches[done](*tensors)

    def load_onto(self, device: torch.device) -> None:
        """Loads the kernels onto the only device that calls will use, so that none loads one.

        The first call for a kernel that fails here reports the reason.
        """
        self._register_once()
        for kernel_id, settle in zip(self._ids, self._settles):
            kernel = note_and_preload(kernel_id, self._origins[kernel_id], device)
            if kernel is not None:
                settle(kernel.handle)

    def _register_and_compute(self, *tensors: torch.Tensor) -> bool | int:
        self._register_once()
        return self.compute(*tensors)

    def _register_once(self) -> None:
        with self._lock.current:
            if not self._is_registered:
                self.compute = self._register()
                self._is_registered = True

    def _register(self) -> _TryDispatch:
        if is_off():
            return _never_launch
        try:
            library = native.load()
            table = library.register_table(self._bounds, self._segments)
        except Exception as error:  # ATen is the fallback for any failure.
            for kernel_id in self._ids:
                leave_to_aten(self._origins[kernel_id], kernel_id, error)
            return _never_launch
        self._settles = [self._settle(library, table, slot) for slot in range(len(self._ids))]
        self._first_launches = [
            launch_first(kernel, self._origins[kernel], settle)
            for kernel, settle in zip(self._ids, self._settles)
        ]
        return functools.partial(library.try_dispatch, table)

    @staticmethod
    def _settle(library: native.Native, table: int, slot: int) -> Callable[[int | None], None]:
        def settle(handle: int | None) -> None:
            library.set_in_table(table, slot, native.ATEN_HANDLE if handle is None else handle)

        return settle


def _never_launch(*tensors: torch.Tensor) -> bool:
    return False
