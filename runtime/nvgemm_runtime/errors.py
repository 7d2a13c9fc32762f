"""Every error this project raises on purpose, each with its own exit code.

This module is imported by all others and imports none of them. A message says where, what, the
observed value against the allowed one, and the next step.
"""

from __future__ import annotations

from typing import ClassVar


class NvgemmError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        exit_code: Process exit status that the command line maps this class to. 0, 1 and 2 are
            left to success, unexpected failures and usage errors.
        stops_compilation: Whether it ends a compilation by torch.compile, because what the user
            asked for cannot be had. Any other error only costs bundled kernels their place among
            the choices.
    """

    exit_code: ClassVar[int] = 3
    stops_compilation: ClassVar[bool] = False


class ManifestError(NvgemmError):
    """A manifest cannot be read or says something that is not allowed."""

    exit_code = 10


class TargetError(NvgemmError):
    """A target is unknown, or nothing installed can build for it."""

    exit_code = 11


class NoCandidateError(NvgemmError):
    """No operator of any provider supports a declared problem."""

    exit_code = 12


class CompileError(NvgemmError):
    """A kernel does not compile, or a problem is left without any kernel."""

    exit_code = 13


class ToolchainError(NvgemmError):
    """A package, the system compiler or a library is missing, most often of the builder side."""

    exit_code = 14


class LinkError(NvgemmError):
    """An object does not link into a loadable kernel."""

    exit_code = 15


class StorageError(NvgemmError):
    """A file cannot be read or written: no space, no permission, missing."""

    exit_code = 16


class RecordError(NvgemmError):
    """GEMMs cannot be recorded where the user asked for it."""

    exit_code = 17
    stops_compilation = True


class BundleFormatError(NvgemmError):
    """A bundle breaks a rule of FORMAT.md.

    Attributes:
        rule: Name of the broken rule, as FORMAT.md lists it.
    """

    exit_code = 20

    def __init__(self, where: str, rule: str, message: str) -> None:
        super().__init__(f"{where}: [{rule}] {message}")
        self.where = where
        self.rule = rule
        self.message = message

    def __reduce__(self) -> tuple[type[BundleFormatError], tuple[str, str, str]]:
        return type(self), (self.where, self.rule, self.message)


class VerificationError(NvgemmError):
    """A bundle keeps its format, but what is in it is not what its entries say."""

    exit_code = 21


class PackagingError(NvgemmError):
    """A wheel cannot be made from the given bundles."""

    exit_code = 22


class CoverageError(NvgemmError):
    """Bundles cover less of the recorded problems than was asked for."""

    exit_code = 23


class TuningError(NvgemmError):
    """Bundles cannot be measured here."""

    exit_code = 24


class SuspectError(NvgemmError):
    """So many kernels came out wrong that the machine or the check may be at fault instead."""

    exit_code = 25


class NoKernelError(NvgemmError):
    """No installed kernel serves a problem.

    Attributes:
        reasons: Why each bundle or kernel that was considered does not serve it.
    """

    exit_code = 30

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[NoKernelError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.reasons)


class RequiredError(NoKernelError):
    """Mode ``required``: torch.compile met a GEMM that no prebuilt kernel serves."""

    exit_code = 33
    stops_compilation = True


class SettingError(NvgemmError):
    """An option or a variable of the plug-in has a value that is not allowed."""

    exit_code = 34
    stops_compilation = True


class DriverError(NvgemmError):
    """The CUDA driver, or a library that kernels call, is missing or reports a failure."""

    exit_code = 31


class UnhealthyError(NvgemmError):
    """This machine lacks something that running prebuilt kernels needs."""

    exit_code = 32


def one_line(text: str) -> str:
    """Squeezes a text into one printable line."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
