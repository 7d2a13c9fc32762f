"""An emulated GPU in this process: `nvgemm_runtime` takes the CPU for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from nvgemm_runtime.bundle.calling_convention import PLAIN, CallingConvention
from nvgemm_runtime.errors import DriverError
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.target import CUDA_VERSIONS
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.matching import device
from nvgemm_runtime.matching.device import DeviceFacts

from ...targets.profile import DeviceProfile
from ...verify.device.cubin import Cubin
from ..driver.caught_launch import CaughtLaunch
from ..driver.stand_in import load_stand_in
from ..emulation_errors import EmulationError
from ..machine.global_memory import Region
from .launch_limits import check_limits, cubin_of, static_shared_bytes
from .relabeled_kernel import RelabeledKernel

Run = Callable[[CaughtLaunch, Cubin, tuple[Region, ...]], object]
"""Executes a launch, given its device code and the memory that it may touch, before it returns."""


@dataclass(frozen=True, kw_only=True)
class CaughtCall:
    """A kernel call, as the emulated device received it.

    Attributes:
        kernel_id: Kernel's id in its bundle.
        launches: Launches by the kernel's launcher, each with what `Run` returned.
    """

    kernel_id: str
    launches: list[tuple[CaughtLaunch, object]]


class EmulatedDevice:
    """The emulated GPU in this process; `start` makes it.

    Attributes:
        profile: Its product.
        calls: Kernel calls, in order. A failed one is among them.
        failures: Failed calls' exceptions, in order: compiled code may hide one by falling back to
            ATen.
    """

    def __init__(self, profile: DeviceProfile, cuda: str, run: Run) -> None:
        self.profile = profile
        self.calls: list[CaughtCall] = []
        self.failures: list[BaseException] = []
        self._run = run
        self._driver = load_stand_in(cuda)
        self._ordinal = self._driver.add_device(profile)
        self._driver.set_callbacks(self._launch, static_shared_bytes)
        self._thread = threading.local()
        self._kernels: dict[str, RelabeledKernel] = {}

    def relabeled(
        self,
        kernel_id: str,
        address: int,
        signature: Signature,
        convention: CallingConvention,
        cluster_size: int,
    ) -> int:
        """Returns the address of a function that calls a payload's with CPU tensors."""
        if kernel_id not in self._kernels:
            clusters = self.profile.sm_count.value
            if convention.takes_clusters and cluster_size > 1:
                clusters = self.profile.cluster_capacity(cluster_size).value
            self._kernels[kernel_id] = RelabeledKernel(
                address,
                signature=signature,
                convention=convention,
                clusters=clusters,
                ordinal=self._ordinal,
                calling=lambda regions: self._calling(kernel_id, regions),
            )
        return self._kernels[kernel_id].address

    @contextlib.contextmanager
    def _calling(self, kernel_id: str, regions: tuple[Region, ...]) -> Iterator[None]:
        call = CaughtCall(kernel_id=kernel_id, launches=[])
        self.calls.append(call)
        self._thread.call, self._thread.regions = call, regions
        self._driver.failure = None
        try:
            yield
            if self._driver.failure is not None:
                raise self._driver.failure
            if unsupported := self._driver.unsupported():
                raise DriverError(
                    f"kernel {kernel_id[:12]}: the emulated driver lacks {', '.join(unsupported)}"
                )
        except BaseException as failure:
            self.failures.append(failure)
            raise
        finally:
            self._thread.call = None

    def _launch(self, launch: CaughtLaunch) -> None:
        call = getattr(self._thread, "call", None)
        if call is None:
            raise DriverError(f"{launch.kernel}: launched outside a call by nvgemm_runtime")
        check_limits(launch, self.profile)
        cubin = cubin_of(launch.image, launch.kernel)
        call.launches.append((launch, self._run(launch, cubin, self._thread.regions)))


_started: EmulatedDevice | None = None


def start(profile: DeviceProfile, run: Run, cuda: str = CUDA_VERSIONS[0]) -> EmulatedDevice:
    """Makes `nvgemm_runtime` take this process's CPU for an emulated GPU, until it ends.

    Its functions, on CPU tensors, then match kernels from bundles for that GPU, and launch them by
    their own launchers. What they launch is executed by ``run``.

    Args:
        profile: The GPU's product.
        run: Executes launches; see `Run`.
        cuda: CUDA major version for which kernels were built, e.g. ``cu13``. `nvgemm_runtime` takes
            torch for one that was built for its first release, e.g. 13.0.

    Raises:
        DriverError: If the process emulates a device already, or uses CUDA.
        ToolchainError: If NVIDIA's libraries or a linker are missing.
    """
    global _started
    if _started is not None:
        raise DriverError(
            f"this process emulates {_started.profile.name} already; emulate {profile.name} in "
            "another one"
        )
    _started = EmulatedDevice(profile, cuda, run)
    _replace_facts(profile, cuda)
    _replace_native(_started)
    return _started


def _replace_facts(profile: DeviceProfile, cuda: str) -> None:
    """Gives the CPU the facts about a product."""
    facts = DeviceFacts(
        kind="cuda",
        name=profile.driver_name,
        capability=profile.capability,
        multiprocessors=profile.sm_count.value,
        platform=device.host_platform(),
        cuda=cuda,
        runtime_library=device.find_runtime_library(cuda),
        shared_memory_bytes=profile.shared_memory_per_block_bytes.value,
        ffi_exports=device.find_ffi_exports(),
    )

    def emulated_facts(kind: str, index: int, wants_determinism: bool) -> DeviceFacts:
        if kind != "cpu":
            raise DriverError(f"tensors are on {kind}:{index}; the emulated GPU takes CPU tensors")
        return replace(facts, wants_determinism=wants_determinism)

    device._device_facts = emulated_facts  # type: ignore[assignment]
    _remember_cuda(f"{cuda.removeprefix('cu')}.0")


def _remember_cuda(version: str) -> None:
    """Makes `nvgemm_runtime` remember that torch was built for a CUDA version, e.g. ``13.0``.

    Its functions ask torch once. Torch itself goes on without CUDA.
    """
    import torch

    actual = torch.version.cuda
    torch.version.cuda = version
    try:
        for function in (device.torch_cuda, device.torch_versions):
            function.cache_clear()
            function()
    finally:
        torch.version.cuda = actual


@dataclass(frozen=True, kw_only=True)
class _RelabelingNative(native.Native):
    """The native launcher, which registers kernels for CUDA as kernels for the CPU."""

    emulated: EmulatedDevice

    def register_kernel(
        self,
        *,
        id: str,
        function_address: int,
        signature: Signature,
        cluster_size: int = 1,
        convention: CallingConvention = PLAIN,
        **others: Any,
    ) -> int:
        """Registers a function that calls the kernel's with CPU tensors."""
        if others.pop("target") is not None:
            function_address = self.emulated.relabeled(
                id, function_address, signature, convention, cluster_size
            )
        return super().register_kernel(
            id=id,
            function_address=function_address,
            signature=signature,
            target=None,
            cluster_size=cluster_size,
            convention=convention,
            **others,
        )


def _replace_native(emulated: EmulatedDevice) -> None:
    import tvm_ffi

    loaded = native.load()
    parts = {field.name: getattr(loaded, field.name) for field in fields(native.Native)}
    native._loaded = _RelabelingNative(emulated=emulated, **parts)
    for kind in (EmulationError, *EmulationError.__subclasses__()):
        tvm_ffi.error.register_error(kind)
