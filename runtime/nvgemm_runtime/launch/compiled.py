"""Entry points for generated code: a GEMM by kernel id, with ATen as the fallback.

Generated modules outlive their process, in torch's caches and in packages. The kernel wheel may be
gone or in another release, or the GPU may differ. Then ATen computes the GEMM, and one warning
names the missing wheel.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import NoKernelError, SettingError
from ..gemm.extra_operands import check_offset_values
from ..gemm.operand_checks import RANKS
from ..gemm.problem import Op
from ..installed.jit_cache import JIT_ORIGIN, mark_used
from ..installed.registry import INSTALLATION
from ..matching.device import DeviceFacts, device_facts
from ..matching.refusals import device_refusal, refusal, timing_refusal
from ..reporting.events import kernel_failed
from ..reporting.generated_choices import note_kernel
from ..settings import is_debugging, is_off
from .loading import native
from .loading.fork_locks import ForkLock
from .loading.loader import LoadedKernel
from .loading.upload import upload
from .select import load_kernel

if TYPE_CHECKING:
    import torch

    from ..bundle.format import Kernel
    from ..bundle.reader import Bundle

_log = logging.getLogger(__name__)

_TryLaunch = Callable[..., bool]
"""Like `nvgemm_runtime.launch.loading.native.Native.try_launch`, without the handle."""


GeneratedCall = Callable[..., "torch.Tensor"]
"""GEMM in generated code. ``call(*tensors, out=out, **options)`` takes the ATen operator's
arguments, writes ``out`` and returns it."""


def gemm(
    aten: Callable[..., torch.Tensor],
    kernel_id: str,
    origin: str,
    order: tuple[int, ...] = (0, 1),
    split: bool = False,
) -> GeneratedCall:
    """Creates a function for generated code to call.

    Its kernel loads immediately if the process uses CUDA, else at the first call.

    Args:
        aten: Fallback for the same tensors and options.
        kernel_id: Kernel id.
        origin: Kernel origin for the warning: ``distribution version`` or an environment variable.
        order: Indices of the tensors that the kernel takes, in its order: A, B, then extras.
        split: True if the kernel takes only A and B, its result is fp32, and the third tensor is
            added afterwards.

    If NVGEMM_AOT_DEBUG is set now, calls raise ValueError for group ends that descend or exceed A.
    """
    if split:
        return _add_separately(aten, gemm(_raise_not_computed, kernel_id, origin), order)
    note_and_preload(kernel_id, origin)
    return make_call(aten, _OneKernel(kernel_id, origin), order)


class _OneKernel:
    """Kernel that every call tries."""

    def __init__(self, kernel_id: str, origin: str) -> None:
        self.name = f"kernel {kernel_id[:12]}"
        self.compute: _TryLaunch = launch_first(kernel_id, origin, self._settle)

    def _settle(self, handle: int | None) -> None:
        self.compute = _never_launch if handle is None else _launch_of(handle)

    def finish(self, done: bool, *tensors: torch.Tensor) -> bool:
        """Returns False: ATen must compute."""
        return False


class Attempt(Protocol):
    """Bundled kernel call that generated code tries before ATen.

    Attributes:
        name: Name in the log.
        compute: ``compute(a, b, out, *extras)`` returns True if it wrote ``out``. May be a
            different function at the next call.
    """

    name: str
    compute: Callable[..., Any]

    def finish(self, done: Any, *tensors: torch.Tensor) -> bool:
        """Finishes a call for which ``compute`` did not return True; returns True if done."""


def make_call(
    aten: Callable[..., torch.Tensor], computing: Attempt, order: tuple[int, ...]
) -> GeneratedCall:
    """Creates a generated call that falls back to ATen; arguments as in `gemm`."""

    # Fast path: most calls have two tensors, and reordering takes as long as checking them.
    def call_in_order(
        a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **options: object
    ) -> torch.Tensor:
        try:
            done = computing.compute(a, b, out)
            if done is True or computing.finish(done, a, b, out):
                return out
        except RuntimeError as error:
            warn_of_memory(computing.name, error)
        return aten(a, b, out=out, **options)

    pick = operator.itemgetter(*order)

    def call_sorted(*tensors: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        a, b, *extras = pick(tensors)
        try:
            done = computing.compute(a, b, out, *extras)
            if done is True or computing.finish(done, a, b, out, *extras):
                return out
        except RuntimeError as error:
            warn_of_memory(computing.name, error)
        return aten(*tensors, out=out, **options)

    call = call_in_order if order == (0, 1) else call_sorted
    return _checking_offsets(call, order) if is_debugging() else call


_origins: dict[str, str] = {}
"""Origins by id for kernels that this process's generated code may call."""


def named_kernels() -> dict[str, str]:
    """Returns origins by id for all kernels that generated code loaded so far may call."""
    return dict(_origins)


def note_and_preload(
    kernel_id: str, origin: str, device: torch.device | None = None
) -> LoadedKernel | None:
    """Records that generated code may call a kernel, and loads it onto a device.

    Generated modules load where they are about to run, mostly on the current device, which is the
    default. On another device, or after a failure here, the first call loads the kernel or reports
    why it cannot.

    Returns:
        The kernel if it has run on the device, else None.
    """
    _origins.setdefault(kernel_id, origin)
    note_kernel(kernel_id)
    device = device or _device_at_hand()
    if device is None or is_off():
        return None
    try:
        kernel = load_for(kernel_id, _device_facts(device))
        return kernel if upload(kernel, device) else None
    except Exception as error:
        _log.debug("kernel %s is not preloaded: %s", kernel_id[:12], error)
        return None


def _device_at_hand() -> torch.device | None:
    """Returns the current CUDA device if the process uses CUDA; None otherwise."""
    import torch

    return default_device() if torch.cuda.is_initialized() else None


def launch_first(kernel_id: str, origin: str, settle: Callable[[int | None], None]) -> _TryLaunch:
    """Creates a function that launches a kernel until it has run once.

    The function returns False if the kernel does not compute: it rejects the operands, memory is
    short, or it is missing or fails, which is logged once per wheel.

    Args:
        kernel_id: Kernel id.
        origin: Kernel origin.
        settle: Callback, called once: with the handle after the kernel has run, or with None if it
            never will.
    """
    lock = ForkLock()
    loaded: _TryLaunch | None = None
    handle: int | None = None

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *extras: torch.Tensor) -> bool:
        nonlocal loaded, handle
        with lock.current:
            if loaded is None:
                kernel = prepare(kernel_id, origin, a.device)
                handle = None if kernel is None else kernel.handle
                loaded = _never_launch if handle is None else _launch_of(handle)
            try:
                done = loaded(a, b, out, *extras)
            except Exception as error:
                done = False
                if _is_out_of_memory(error):
                    warn_of_memory(f"kernel {kernel_id[:12]}", error)
                else:
                    # The kernel never ran here; for example, the driver cannot load it.
                    leave_to_aten(origin, kernel_id, error)
                    loaded, handle = _never_launch, None
            # An empty result or an empty sum launches nothing, so it proves nothing.
            if (done and out.numel() and a.numel()) or loaded is _never_launch:
                settle(handle)
            return done

    return launch


def _launch_of(handle: int) -> _TryLaunch:
    return functools.partial(native.load().try_launch, handle)


def _checking_offsets(call: GeneratedCall, order: tuple[int, ...]) -> GeneratedCall:
    """Returns a call that first checks group ends, which synchronizes with the device."""
    import torch

    def check(*tensors: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        a, b, *extras = (tensors[index] for index in order)
        if (a.dim(), b.dim()) == RANKS[Op.GROUPED_MM]:
            # Scales, if any, precede the offsets.
            offsets = next(extra for extra in extras if extra.dtype is torch.int32)
            check_offset_values(offsets, a.shape[0])
        elif extras and extras[0].dtype is torch.int32 and a.dim() == 2:  # no addend is int32
            check_offset_values(extras[0], a.shape[1], Op.K_GROUPED_MM.value, "k")
        return call(*tensors, out=out, **options)

    return check


def _add_separately(
    aten: Callable[..., torch.Tensor], product: GeneratedCall, order: tuple[int, ...]
) -> GeneratedCall:
    """Returns a call that computes an fp32 product and a sum, rounded once like ATen's."""
    import torch

    def call(*tensors: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        a, b, addend = (tensors[index] for index in order)
        try:
            exact = product(a, b, out=torch.empty_like(out, dtype=torch.float32))
        except _NotComputedError:
            return aten(*tensors, out=out, **options)
        return torch.add(exact, addend, out=out)

    return call


class _NotComputedError(Exception):
    """Raised if a kernel cannot compute a product."""


def _raise_not_computed(
    *tensors: torch.Tensor, out: torch.Tensor, **options: object
) -> torch.Tensor:
    raise _NotComputedError


def prepare(kernel_id: str, origin: str, device: torch.device | None = None) -> LoadedKernel | None:
    """Loads a kernel that code was compiled for; on failure warns once per wheel, returns None.

    Returns None without a warning under ``NVGEMM_AOT=off``. Without a device, uses the one from
    `default_device`.

    Raises:
        SettingError: If NVGEMM_AOT has an unknown value.
    """
    if is_off():
        return None
    try:
        return load_for(kernel_id, _device_facts(device))
    except SettingError:
        raise
    except Exception as error:  # ATen is the fallback for any failure.
        leave_to_aten(origin, kernel_id, error)
        return None


def load_for(kernel_id: str, facts: DeviceFacts) -> LoadedKernel:
    """Loads a kernel that code was compiled for, if a device can run it.

    Raises:
        NoKernelError: If no bundle holds it, or the device or a setting rules it out.
        NvgemmError: If it cannot be loaded; see `loader.KernelLoader.load`.
    """
    entry = _find_kernel(kernel_id)
    for problem in INSTALLATION.user_bundle_problems(kernel_id):
        mark_used(problem)
    if entry is not None:
        bundle, kernel = entry
        reason = refusal(bundle.facts, facts)
        reason = reason or timing_refusal(kernel, facts.wants_determinism)
        if reason is not None:
            raise NoKernelError(reason, (reason,))
    return load_kernel(kernel_id)


def why_for_another_device(kernel_id: str, facts: DeviceFacts) -> str | None:
    """Returns why a kernel is for another device; None if it is not, or not found."""
    entry = _find_kernel(kernel_id)
    return None if entry is None else device_refusal(entry[0].facts.target, facts)


def _find_kernel(kernel_id: str) -> tuple[Bundle, Kernel] | None:
    """Returns the kernel that code was compiled for, and its bundle; None if not found."""
    if INSTALLATION.kernel(kernel_id) is None:
        # Another process may have compiled it since: its graph is in torch's cache.
        INSTALLATION.refresh_user_bundles()
    return INSTALLATION.kernel(kernel_id)


def _device_facts(device: torch.device | None) -> DeviceFacts:
    device = device or default_device()
    return device_facts(device.type, device.index or 0)


def default_device() -> torch.device:
    """Returns the current CUDA device, or the CPU without one."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _is_out_of_memory(error: Exception) -> bool:
    """Returns True if a launch failed for lack of memory, which may be temporary."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def warn_of_memory(name: str, error: Exception) -> None:
    """Logs that ATen computes a GEMM because a workspace cannot be allocated.

    Raises:
        Exception: ``error``, if it is any other error.
    """
    if not _is_out_of_memory(error):
        raise error
    _log.warning("%s: %s; ATen computes this GEMM", name, error)


def report_cpp_failure(kernel_id: str, kind: str, message: str) -> None:
    """Logs that generated C++ uses ATen because a kernel launch failed.

    Args:
        kernel_id: Kernel id.
        kind: Error class name.
        message: Error text, which names the kernel.
    """
    if kind == "OutOfMemoryError":
        _log.warning("%s; ATen computes this GEMM", message)
        return
    entry = INSTALLATION.kernel(kernel_id)
    origins = [
        installed.origin
        for installed in INSTALLATION.bundles()
        if entry and installed.bundle is entry[0]
    ]
    leave_to_aten(origins[0] if origins else f"kernel {kernel_id[:12]}", kernel_id, message)


def _never_launch(*tensors: torch.Tensor) -> bool:
    return False


_warned: set[tuple[str, str]] = set()
"""Logged pairs of wheel and reason."""

_NUMBERS = re.compile(r"\b[0-9a-f]*[0-9][0-9a-f]*\b")
"""Numbers and ids in reasons, which vary between kernels."""


def leave_to_aten(origin: str, kernel_id: str, error: object) -> None:
    """Reports that ATen computes a kernel's GEMMs from now on, and logs a warning.

    Logs once per wheel and reason: if one kernel is missing, others usually are too.
    """
    reason = str(error)
    is_first = kernel_failed(kernel_id, reason)
    warning = origin, _NUMBERS.sub("", reason)
    if not is_first or warning in _warned:
        return
    _warned.add(warning)
    if kernel_id[:12] not in reason:
        reason = f"kernel {kernel_id[:12]}: {reason}"
    is_wheel = not origin.startswith(JIT_ORIGIN)
    _log.warning(
        "a compiled graph runs GEMMs on ATen instead of the kernels of %s: %s; %s",
        origin,
        reason,
        "reinstall that kernel wheel, or compile again" if is_wheel else "compile again",
    )
