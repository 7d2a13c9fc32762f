"""Errors that this project raises on purpose, each with its own exit code, and their texts.

All modules import this one, and it imports none of them. A message says where, what, the observed
value against the allowed one, and the next step. The exit-code reference is generated from the
classes: it prints each docstring up to its attributes.
"""

from __future__ import annotations

from typing import ClassVar


class NvgemmError(Exception):
    """Base class for errors raised on purpose.

    Attributes:
        exit_code: Process exit status for this class on the command line. 0, 1 and 2 mean success,
            unexpected failures and usage errors.
        stops_compilation: True if it ends a compilation by torch.compile, because the user's
            request cannot be met. Any other error only drops bundled kernels from the choices.
    """

    exit_code: ClassVar[int] = 3
    stops_compilation: ClassVar[bool] = False


class ManifestError(NvgemmError):
    """A manifest or a model's config is wrong.

    An unknown target or device counts too. Every mistake is reported with file, line and column.
    """

    exit_code = 10


class TargetError(NvgemmError):
    """A target is unknown, or no installed provider can build for it.

    The command reports an unknown target as a mistake in the manifest, 10.
    """

    exit_code = 11


class NoCandidateError(NvgemmError):
    """A declared problem has no operator on any target in the manifest.

    The message has the reason, and everything else was built. With ``--strict``: a target lacks an
    operator for a problem, and nothing was written.
    """

    exit_code = 12


class CompileError(NvgemmError):
    """A declared problem has operators, but none of them compiles.

    Everything else was built. With ``--strict``: a kernel does not compile or link, and nothing was
    written.
    """

    exit_code = 13


class ToolchainError(NvgemmError):
    """A package, the C compiler or a library is missing, most often one that the builder needs.

    Also: compiler processes end before they are ready, or an installed package's entry points
    cannot be read. The message has the command that installs the missing part, or names the
    package.
    """

    exit_code = 14


class LinkError(NvgemmError):
    """An object does not link into a loadable kernel.

    The command reports it as a kernel that does not compile, 13.
    """

    exit_code = 15


class StorageError(NvgemmError):
    """A file cannot be read or written: no space, no permission, missing."""

    exit_code = 16


class RecordError(NvgemmError):
    """GEMMs cannot be recorded: the file cannot be written, or is not a recording."""

    exit_code = 17
    stops_compilation = True


class BundleFormatError(NvgemmError):
    """A bundle breaks a rule of its format.

    Attributes:
        rule: Name of the broken rule in FORMAT.md.
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
    """``verify``: a bundle is well-formed, but its kernels contradict their entries."""

    exit_code = 21


class PackagingError(NvgemmError):
    """Bundles cannot be merged, split or packed into wheels, or installed files are damaged."""

    exit_code = 22


class CoverageError(NvgemmError):
    """``coverage --fail-under``: bundles cover less than requested."""

    exit_code = 23


class TuningError(NvgemmError):
    """``tune`` or ``confirm``: kernels cannot be measured here.

    The GPU does not match, no problem is declared, or no kernel is correct.
    """

    exit_code = 24


class SuspectError(NvgemmError):
    """``tune``: so many kernels were wrong that the run itself is suspect.

    All kernels of a signature, or most of all kernels, were wrong. ``--accept-suspect`` writes the
    bundle.
    """

    exit_code = 25


class EmulatedKernelError(NvgemmError):
    """``emulate``: a kernel computes a wrong result, or does what no kernel must do."""

    exit_code = 27


class RankingsError(NvgemmError):
    """A file of rankings or confirmations is damaged or of another format, or fits no target.

    The last case is an error only with ``--strict``.
    """

    exit_code = 26


class SignatureError(NvgemmError):
    """A policy or a signature is wrong, or what must be signed has no signature that counts."""

    exit_code = 28


class ExecutorError(NvgemmError):
    """``--executor``: a Dask scheduler cannot be reached or was lost, or no worker can do the work.

    What was finished is kept, and the same command continues.
    """

    exit_code = 29


class NoKernelError(NvgemmError):
    """No installed kernel serves a problem; raised in the user's program.

    Attributes:
        reasons: Reason for each bundle or kernel considered.
    """

    exit_code = 30

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[NoKernelError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.reasons)


class RequiredError(NoKernelError):
    """Mode ``required``: no prebuilt kernel serves a GEMM of torch.compile or `linear`.

    Raised in the user's program.
    """

    exit_code = 33
    stops_compilation = True


class SettingError(NvgemmError):
    """A plug-in option has an invalid value; raised in the user's program."""

    exit_code = 34
    stops_compilation = True


class DriverError(NvgemmError):
    """The CUDA driver, or a library that kernels call, is missing or reports a failure."""

    exit_code = 31


class UnhealthyError(NvgemmError):
    """``doctor``: this machine lacks something that running prebuilt kernels needs."""

    exit_code = 32


def one_line(text: str) -> str:
    """Squeezes third-party messages into one printable line."""
    return "".join(
        character if character.isprintable() else "?" for character in " ".join(text.split())
    )


def count_text(count: int, noun: str) -> str:
    """Returns a count with its noun: ``1 problem``, ``2 keys``, ``2 entries``, ``2 processes``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


UPGRADE = "upgrade: install a newer nvgemm-aot"
"""Next step if a newer release is needed."""


def install_command(extras: str = "", *, reinstall: bool = False) -> str:
    """Returns the command that installs nvgemm-aot, followed by where to run it.

    No registry has nvgemm-aot: a package with its name there could be somebody else's.

    Args:
        extras: Names of extras between commas, such as ``build``.
        reinstall: True to replace the installed nvgemm-aot's files, and nothing else.
    """
    options = "--force-reinstall --no-deps " if reinstall else ""
    target = f"'.[{extras}]'" if extras else "."
    return (
        f"pip install {options}{target} in nvgemm-aot's checkout, or with the path of its wheel in "
        "place of the dot"
    )
