"""Loads the stand-in for the CUDA driver into this process, and receives launches from it."""

from __future__ import annotations

import ctypes
import importlib.resources
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from nvgemm_runtime.errors import DriverError, ToolchainError, install_command

from ...targets.profile import DeviceProfile
from .caught_launch import CaughtLaunch, LaunchStruct, read_image, read_launch
from .runtime_archive import link_archive

LIBRARY = "_emulated_cuda.so"

_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_PER_BLOCK = 16, 75, 76, 97
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR
and _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN (cuda.h, CUdevice_attribute)."""

_SUCCESS, _LAUNCH_FAILED = 0, 719
"""CUDA_SUCCESS and CUDA_ERROR_LAUNCH_FAILED (cuda.h, CUresult)."""

_Launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchStruct))
_SharedBytes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)


class StandIn:
    """The stand-in for the driver in this process; `load_stand_in` makes one.

    Attributes:
        failure: The latest launch's exception; None if it succeeded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._library.nvgemm_emulated_unsupported.restype = ctypes.c_char_p
        self._callbacks: tuple[object, object] | None = None
        self.failure: BaseException | None = None

    def add_device(self, profile: DeviceProfile) -> int:
        """Adds a device with a product's capability, sizes and limits; returns its ordinal."""
        ordinal = int(self._library.nvgemm_emulated_add_device())
        if ordinal < 0:
            raise DriverError("the emulated driver has its 64 devices already; add fewer")
        major, minor = profile.capability
        for attribute, value in (
            (_MULTIPROCESSORS, profile.sm_count.value),
            (_CAPABILITY_MAJOR, major),
            (_CAPABILITY_MINOR, minor),
            (_SHARED_PER_BLOCK, profile.shared_memory_per_block_bytes.value),
        ):
            self._library.nvgemm_emulated_set_attribute(ordinal, attribute, value)
        for size, clusters in profile.max_active_clusters.items():
            self._library.nvgemm_emulated_set_clusters(ordinal, size, clusters.value)
        return ordinal

    def set_callbacks(
        self,
        run: Callable[[CaughtLaunch], object],
        static_shared_bytes: Callable[[bytes, str], int],
    ) -> None:
        """Sets what executes launches, and what reads a kernel's static shared memory.

        Args:
            run: Executes a launch before it returns. After an exception, which `failure` keeps, the
                launch fails with CUDA_ERROR_LAUNCH_FAILED.
            static_shared_bytes: Returns a kernel's static shared memory per block, in bytes and
                without CUDA's reserved part, for an image and a kernel name.
        """

        def launch(pointer: ctypes._Pointer[LaunchStruct]) -> int:
            self.failure = None
            try:
                run(read_launch(pointer.contents))
            except BaseException as failure:  # the launcher, written in C, must see an error
                self.failure = failure
                return _LAUNCH_FAILED
            return _SUCCESS

        def shared_bytes(image: int, kernel: bytes) -> int:
            try:
                return static_shared_bytes(read_image(image), kernel.decode())
            except BaseException as failure:
                self.failure = failure
                return -1

        self._callbacks = (_Launch(launch), _SharedBytes(shared_bytes))  # C keeps pointers to them
        self._library.nvgemm_emulated_set_callbacks(*self._callbacks)

    def unsupported(self) -> tuple[str, ...]:
        """Returns the CUDA functions that were called and that the stand-in lacks."""
        text: bytes = self._library.nvgemm_emulated_unsupported()
        return tuple(text.decode().splitlines())


def load_stand_in(cuda: str | None = None) -> StandIn:
    """Makes the stand-in this process's CUDA driver, for its whole life.

    Args:
        cuda: CUDA major version, e.g. ``cu13``, for whose kernels launches are caught. None leaves
            launchers to NVIDIA's library, which needs a real driver.

    Raises:
        DriverError: If the process has loaded another driver, or kernels' launchers already.
        ToolchainError: If the stand-in or NVIDIA's archive is missing, or there is no linker.
    """
    resource = importlib.resources.files(__package__).joinpath(LIBRARY)
    with importlib.resources.as_file(resource) as path:
        if not path.is_file():
            raise ToolchainError(
                f"{path} is missing: nvgemm-aot was installed without its native part; "
                f"run: {install_command(reinstall=True)}"
            )
        library = ctypes.CDLL(str(path))
        if ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)._handle != library._handle:
            raise DriverError(
                "this process has loaded another CUDA driver; emulate in a process that has not "
                "used CUDA"
            )
        if cuda is not None:
            with tempfile.TemporaryDirectory(prefix="nvgemm-emulator-") as directory:
                linked = link_archive(cuda, path, Path(directory))
                # Global: payloads find its functions before those of NVIDIA's library. Bound
                # deeply: it finds the stand-in's before those of a CUDA runtime that torch loaded.
                ctypes.CDLL(str(linked), mode=os.RTLD_GLOBAL | os.RTLD_DEEPBIND)
    return StandIn(library)
