"""What generated code calls: a GEMM by its kernel's id, with ATen as the fallback.

Generated modules outlive the process that made them, in torch's caches and in packages. The kernel
wheel may be gone, another release of it installed, or the GPU another one; then ATen computes the
GEMM, and one warning names the missing wheel.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import NoKernelError, SettingError
from ..events import kernel_failed
from ..gemm.extra_operands import check_offset_values
from ..gemm.operands import RANKS
from ..gemm.problem import Op
from ..installed.jit_cache import JIT_ORIGIN, mark_used
from ..installed.registry import INSTALLATION
from ..matching.device import DeviceFacts, device_facts
from ..matching.refusals import device_refusal, refusal, timing_refusal
from ..settings import is_debugging, is_off
from . import native
from .fork_locks import ForkLock
from .loader import LoadedKernel
from .select import load_kernel
from .upload import upload

if TYPE_CHECKING:
    import torch

    from ..bundle.format import Kernel
    from ..bundle.reader import Bundle

_log = logging.getLogger(__name__)

_TryLaunch = Callable[..., bool]
"""As `nvgemm_runtime.launch.native.Native.try_launch`, without the handle."""


GeneratedCall = Callable[..., "torch.Tensor"]
"""A GEMM in generated code: ``call(*tensors, out=out, **options)`` takes the arguments of ATen's
operator, computes into ``out`` and returns it."""


def gemm(
    aten: Callable[..., torch.Tensor],
    kernel_id: str,
    origin: str,
    order: tuple[int, ...] = (0, 1),
    split: bool = False,
) -> GeneratedCall:
    """Make a function for generated code to call.

    Its kernel is loaded at once where the process uses CUDA, and otherwise at the first call.

    Args:
        aten: Computes the same, with the same tensors and options.
        kernel_id: The kernel.
        origin: What brought it, for the warning: ``distribution version`` or a variable's name.
        order: Which of the tensors the kernel takes, as it takes them: A, B and the others.
        split: Whether the kernel takes A and B alone, its result is fp32, and the third tensor is
            added behind it.

    If NVGEMM_AOT_DEBUG is set when this is called, calls raise ValueError for ends of groups that
    fall or pass the end of A.
    """
    if split:
        return _split(aten, gemm(_raise_not_computed, kernel_id, origin), order)
    expect(kernel_id, origin)
    return make_call(aten, _OneKernel(kernel_id, origin), order)


class _OneKernel:
    """A kernel that every call tries."""

    def __init__(self, kernel_id: str, origin: str) -> None:
        self.name = f"kernel {kernel_id[:12]}"
        self.compute: _TryLaunch = launch_first(kernel_id, origin, self._settle)

    def _settle(self, handle: int | None) -> None:
        self.compute = _refuse if handle is None else _launch_of(handle)

    def finish(self, done: bool, *tensors: torch.Tensor) -> bool:
        """It is not computed."""
        return False


class Computing(Protocol):
    """What a generated call tries before ATen.

    Attributes:
        name: For the log.
        compute: ``compute(a, b, out, *extras)`` is True where it computed into ``out``. It may be
            another function at the next call.
    """

    name: str
    compute: Callable[..., Any]

    def finish(self, done: Any, *tensors: torch.Tensor) -> bool:
        """Whether a call of which ``compute`` returned something else than True is done now."""


def make_call(
    aten: Callable[..., torch.Tensor], computing: Computing, order: tuple[int, ...]
) -> GeneratedCall:
    """Make a generated call that leaves to ATen what is not computed; arguments as of `gemm`."""

    # Most calls are of two tensors, and sorting tensors takes as long as checking them.
    def call_in_order(
        a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **options: object
    ) -> torch.Tensor:
        try:
            done = computing.compute(a, b, out)
            if done is True or computing.finish(done, a, b, out):
                return out
        except RuntimeError as error:
            _warn_of_memory(computing.name, error)
        return aten(a, b, out=out, **options)

    pick = operator.itemgetter(*order)

    def call_sorted(*tensors: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        a, b, *extras = pick(tensors)
        try:
            done = computing.compute(a, b, out, *extras)
            if done is True or computing.finish(done, a, b, out, *extras):
                return out
        except RuntimeError as error:
            _warn_of_memory(computing.name, error)
        return aten(*tensors, out=out, **options)

    call = call_in_order if order == (0, 1) else call_sorted
    return _checked(call, order) if is_debugging() else call


_named: dict[str, str] = {}
"""The kernels that generated code of this process may call: by id, what brought them."""


def named_kernels() -> dict[str, str]:
    """The kernels that generated code loaded so far may call: by id, what brought them."""
    return dict(_named)


def expect(kernel_id: str, origin: str) -> None:
    """Note that generated code may call a kernel, and load it onto the device at hand.

    Generated modules are loaded where they are about to run, mostly on the current device. On
    another one, and where this fails, the first call loads the kernel, or says why it cannot.
    """
    _named.setdefault(kernel_id, origin)
    device = _device_at_hand()
    if device is None or is_off():
        return
    try:
        upload(load_for(kernel_id, _device_facts(device)), device)
    except Exception as error:
        _log.debug("kernel %s is not loaded ahead: %s", kernel_id[:12], error)


def _device_at_hand() -> torch.device | None:
    """The current CUDA device of a process that uses CUDA; None for any other process."""
    import torch

    return usual_device() if torch.cuda.is_initialized() else None


def launch_first(kernel_id: str, origin: str, settle: Callable[[int | None], None]) -> _TryLaunch:
    """Make a function that launches a kernel as long as it has not run here.

    It returns False where the kernel does not compute: it cannot take the operands, memory is
    short, or it is missing or fails, for which there is one warning a wheel.

    Args:
        kernel_id: The kernel.
        origin: What brought it.
        settle: Is called once the kernel has run, with its handle; or with None once it is known
            that it never will.
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
                loaded = _refuse if handle is None else _launch_of(handle)
            try:
                done = loaded(a, b, out, *extras)
            except Exception as error:
                done = False
                if _is_out_of_memory(error):
                    _warn_of_memory(f"kernel {kernel_id[:12]}", error)
                else:
                    # A kernel that never ran here, say because the driver cannot load it.
                    leave_to_aten(origin, kernel_id, error)
                    loaded, handle = _refuse, None
            # Nothing is launched for an empty result or an empty sum.
            if (done and out.numel() and a.numel()) or loaded is _refuse:
                settle(handle)
            return done

    return launch


def _launch_of(handle: int) -> _TryLaunch:
    return functools.partial(native.load().try_launch, handle)


def _checked(call: GeneratedCall, order: tuple[int, ...]) -> GeneratedCall:
    """A call that checks the ends of groups first, for which it waits for the device."""
    import torch

    def check(*tensors: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        a, b, *extras = (tensors[place] for place in order)
        if (a.dim(), b.dim()) == RANKS[Op.GROUPED_MM]:
            # Scales, where there are some, stand in front of the ends.
            offsets = next(one for one in extras if one.dtype is torch.int32)
            check_offset_values(offsets, a.shape[0])
        elif extras and extras[0].dtype is torch.int32 and a.dim() == 2:  # no addend is of int32
            check_offset_values(extras[0], a.shape[1], Op.K_GROUPED_MM.value, "k")
        return call(*tensors, out=out, **options)

    return check


def _split(
    aten: Callable[..., torch.Tensor], product: GeneratedCall, order: tuple[int, ...]
) -> GeneratedCall:
    """A product in fp32 and a sum, which rounds once, as ATen does."""
    import torch

    def call(*tensors: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        a, b, addend = (tensors[place] for place in order)
        try:
            exact = product(a, b, out=torch.empty_like(out, dtype=torch.float32))
        except _NotComputedError:
            return aten(*tensors, out=out, **options)
        return torch.add(exact, addend, out=out)

    return call


class _NotComputedError(Exception):
    """A kernel could not compute a product."""


def _raise_not_computed(
    *tensors: torch.Tensor, out: torch.Tensor, **options: object
) -> torch.Tensor:
    raise _NotComputedError


def prepare(kernel_id: str, origin: str, device: torch.device | None = None) -> LoadedKernel | None:
    """Load a kernel that code was compiled for; None, with one warning a wheel, where that fails.

    Under ``NVGEMM_AOT=off`` it is None, without a warning. Without a device, it is for where CUDA
    would run.

    Raises:
        SettingError: If NVGEMM_AOT names no mode.
    """
    if is_off():
        return None
    try:
        return load_for(kernel_id, _device_facts(device))
    except SettingError:
        raise
    except Exception as error:  # ATen can always compute it.
        leave_to_aten(origin, kernel_id, error)
        return None


def load_for(kernel_id: str, facts: DeviceFacts) -> LoadedKernel:
    """Load a kernel that code was compiled for, if a device can run it.

    Raises:
        NoKernelError: If no bundle holds it, or the device or a setting speaks against it.
        NvgemmError: If it cannot be loaded; see `loader.KernelLoader.load`.
    """
    place = _find(kernel_id)
    for problem in INSTALLATION.kept_problems(kernel_id):
        mark_used(problem)
    if place is not None:
        bundle, kernel = place
        reason = refusal(bundle.header, facts)
        reason = reason or timing_refusal(kernel, facts.wants_determinism)
        if reason is not None:
            raise NoKernelError(reason, (reason,))
    return load_kernel(kernel_id)


def why_for_another_device(kernel_id: str, facts: DeviceFacts) -> str | None:
    """Why a kernel is for another device than this one; None if it is not, or nobody has it."""
    place = _find(kernel_id)
    return None if place is None else device_refusal(place[0].header.target, facts)


def _find(kernel_id: str) -> tuple[Bundle, Kernel] | None:
    """A kernel that code was compiled for, and the bundle that holds it."""
    if kernel_id not in INSTALLATION.kernels():
        # Another process may have compiled it since, and torch's cache has its graph.
        INSTALLATION.refresh_kept_bundles()
    return INSTALLATION.kernels().get(kernel_id)


def _device_facts(device: torch.device | None) -> DeviceFacts:
    device = device or usual_device()
    return device_facts(device.type, device.index or 0)


def usual_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a launch failed for want of memory, of which there may be enough at the next call."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _warn_of_memory(name: str, error: Exception) -> None:
    """Log that ATen computes a GEMM because there is no memory for a kernel's workspace.

    Raises:
        Exception: The error, if it is another one.
    """
    if not _is_out_of_memory(error):
        raise error
    _log.warning("%s: %s; ATen computes this GEMM", name, error)


def report_failure(kernel_id: str, kind: str, message: str) -> None:
    """Log that generated C++ runs on ATen because the launch of a kernel failed.

    Args:
        kernel_id: The kernel.
        kind: Name of the error's class.
        message: The error's text, which names the kernel.
    """
    if kind == "OutOfMemoryError":
        _log.warning("%s; ATen computes this GEMM", message)
        return
    place = INSTALLATION.kernels().get(kernel_id)
    brought = [
        found.origin for found in INSTALLATION.bundles() if place and found.bundle is place[0]
    ]
    leave_to_aten(brought[0] if brought else f"kernel {kernel_id[:12]}", kernel_id, message)


def _refuse(*tensors: torch.Tensor) -> bool:
    return False


_warned: set[tuple[str, str]] = set()
"""What was logged: by wheel and reason, once."""

_NUMBERS = re.compile(r"\b[0-9a-f]*[0-9][0-9a-f]*\b")
"""Numbers and ids in reasons, which differ from kernel to kernel."""


def leave_to_aten(origin: str, kernel_id: str, error: object) -> None:
    """Report that ATen computes the GEMMs of a kernel from now on, and warn of it.

    There is one warning for each wheel and reason: where one kernel is missing, others mostly are.
    """
    reason = str(error)
    is_first = kernel_failed(kernel_id, reason)
    known = origin, _NUMBERS.sub("", reason)
    if not is_first or known in _warned:
        return
    _warned.add(known)
    if kernel_id[:12] not in reason:
        reason = f"kernel {kernel_id[:12]}: {reason}"
    is_wheel = not origin.startswith(JIT_ORIGIN)
    _log.warning(
        "a compiled graph runs GEMMs on ATen instead of the kernels of %s: %s; %s",
        origin,
        reason,
        "install that kernel wheel again, or compile again" if is_wheel else "compile again",
    )
