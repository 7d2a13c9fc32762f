"""Records the GEMMs that Inductor compiles, where the user asks for that (NVGEMM_AOT_RECORD)."""

from __future__ import annotations

from collections.abc import Callable

from ..gemm.aten import AtenGemm
from ..recording.recorder import chosen_target, recorder
from .failures import survive


def record_gemm(read: Callable[[], AtenGemm]) -> None:
    """Record a GEMM, whether or not choices for it are timed.

    Args:
        read: Gives the GEMM; not called where nothing is recorded.

    Raises:
        RecordError: If it is to be recorded and cannot be.
    """
    try:
        to = recorder()
        if to is None:
            return
        # Imported here, so that compiling without recording does not pay for it.
        from ..matching.device import device_facts
        from ..recording.declarable import declarable_for

        gemm = read()
        device = gemm.a.device
        target = chosen_target(device_facts(device.type, device.index or 0).capability)
        to.add(declarable_for(gemm, target), target)
    except Exception as error:
        survive(error)
