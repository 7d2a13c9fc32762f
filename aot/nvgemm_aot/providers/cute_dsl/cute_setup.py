"""Selects an installed CuTe-DSL compiler and prepares the process for it.

Each CUDA major version has its own compiler package. A process can load only one. Importing this
module is cheap.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nvgemm_runtime.errors import ToolchainError, install_command
from nvgemm_runtime.gemm.target import CUDA_VERSIONS

_log = logging.getLogger(__name__)

DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    f"nvidia-cutlass-dsl-libs-{CUDA_VERSIONS[0]}",
    "apache-tvm-ffi",
)
"""Compiler distributions, whose versions shape the code of every ``@cute.jit`` function. For
another CUDA version, `for_cuda` substitutes that version's compiler."""


_COMPILER_VARIABLES = ("CUTE_DSL_", "CUTLASS_")
"""Prefixes of environment variables that the compiler reads."""

_ARCHITECTURE_VARIABLE, _ARCHITECTURE = "CUTE_DSL_ARCH", "sm_100a"
"""Architecture that the compiler assumes without a GPU. Each kernel names its own target.

Without this variable, the compiler asks the driver. With all GPUs hidden, it does so over a hundred
times: 4 s per process on a machine with an H200, 90 s with 16 processes at once.
"""


def for_cuda(versions: Mapping[str, str], cuda: str) -> dict[str, str]:
    """Returns versions for kernels of a CUDA version, substituting that version's compiler.

    Raises:
        ToolchainError: If that version's compiler is not installed.
    """
    default_package = f"nvidia-cutlass-dsl-libs-{CUDA_VERSIONS[0]}"
    package = f"nvidia-cutlass-dsl-libs-{cuda}"
    if default_package == package or default_package not in versions:
        return dict(versions)
    try:
        package_version = version(package)
    except PackageNotFoundError as error:
        raise ToolchainError(
            f"cannot compile kernels for {cuda}: {package} is not installed; "
            f"run: {compiler_install_command(cuda)}"
        ) from error
    others = {name: text for name, text in versions.items() if name != default_package}
    return {**others, package: package_version}


def installed_versions(distributions: Iterable[str], kernels: str) -> dict[str, str]:
    """Returns installed distribution versions; ``kernels`` names their use in messages.

    Raises:
        ToolchainError: If a distribution is not installed.
    """
    try:
        return {name: version(name) for name in distributions}
    except PackageNotFoundError as error:
        raise ToolchainError(
            f"cannot compile {kernels}: {error.name} is not installed; "
            f"run: {install_command('build')}"
        ) from error


def set_environment(also: tuple[str, ...] = ()) -> None:
    """Removes variables that change compiled code, because cache keys do not cover them.

    Args:
        also: Further prefixes, for variables that a kernel library reads.
    """
    prefixes = (*_COMPILER_VARIABLES, *also)
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        value = os.environ.pop(name)
        if (name, value) != (_ARCHITECTURE_VARIABLE, _ARCHITECTURE):
            _log.warning("builds ignore %s=%s", name, value)
    os.environ[_ARCHITECTURE_VARIABLE] = _ARCHITECTURE
    if _chosen_cuda is not None:
        _load_compiler(_chosen_cuda)


_chosen_cuda: str | None = None
"""CUDA version for this process's kernels; None if none was chosen."""

CUTLASS_IR = "cutlass._mlir._mlir_libs._cutlass_ir"
"""Name of the compiler's extension module, the same for every CUDA version."""


def choose_cuda(cuda: str) -> None:
    """Selects this process's CUDA version. Call it before `set_environment`.

    Left alone, the DSL selects the newest version that the build machine's driver supports, or the
    newest installed version if the machine has no driver.
    """
    global _chosen_cuda
    _chosen_cuda = cuda


def _load_compiler(cuda: str) -> None:
    """Imports the compiler for a CUDA version under the module name that the DSL expects.

    Raises:
        ToolchainError: If it is not installed, cannot be loaded, or another compiler is loaded.
    """
    spec = importlib.util.find_spec("cutlass")
    folders = [Path(location) for location in (spec and spec.submodule_search_locations) or ()]
    files = [
        file
        for folder in folders
        for file in sorted((folder / "_mlir" / "_mlir_libs").glob(f"_cutlass_ir.{cuda}.*.so"))
    ]
    if not files:
        raise ToolchainError(
            f"cannot compile kernels for {cuda}: no compiler for it is installed; "
            f"run: {compiler_install_command(cuda)}"
        )
    loaded = sys.modules.get(CUTLASS_IR)
    if loaded is None:
        module_spec = importlib.util.spec_from_file_location(CUTLASS_IR, files[0])
        assert module_spec is not None  # the suffix is .so
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[CUTLASS_IR] = module
        try:
            module_spec.loader.exec_module(module)
            # Importing the parent package leaves the loaded module in place.
            package, _, name = CUTLASS_IR.rpartition(".")
            setattr(importlib.import_module(package), name, module)
        except ImportError as error:
            del sys.modules[CUTLASS_IR]
            raise ToolchainError(
                f"cannot compile kernels for {cuda}: {files[0]}: {error}; "
                f"run: {compiler_install_command(cuda, reinstall=True)}"
            ) from error
    elif loaded.__file__ != str(files[0]):
        raise ToolchainError(
            f"cannot compile kernels for {cuda}: this process has loaded {loaded.__file__} and can "
            "load only one compiler; compile in another process"
        )


def compiler_install_command(cuda: str, *, reinstall: bool = False) -> str:
    """Returns the command that installs a CUDA version's compiler for the installed DSL.

    Raises:
        ToolchainError: If the DSL is not installed.
    """
    dsl_version = installed_versions(["nvidia-cutlass-dsl"], "kernels")["nvidia-cutlass-dsl"]
    options = "--force-reinstall --no-deps " if reinstall else ""
    return f"pip install {options}nvidia-cutlass-dsl-libs-{cuda}=={dsl_version}"
