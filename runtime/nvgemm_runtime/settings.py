"""What a user sets by environment variables; `VARIABLES` describes every one of the project."""

from __future__ import annotations

import enum
import functools
import logging
import os


class Mode(str, enum.Enum):
    """How torch.compile may use bundled kernels."""

    AUTO = "auto"
    """Bundled kernels are used; under max-autotune, others may be compiled at run time."""
    REQUIRED = "required"
    """Nothing is compiled. Under max-autotune, a GEMM that no bundled kernel covers is an error;
    without it, a declared one whose kernel cannot be used."""
    OFF = "off"
    """The plug-in does nothing."""


MODE_VARIABLE = "NVGEMM_AOT"
"""The `Mode` of a process; ``auto`` if not set."""

COMPILE_OPTION = "nvgemm_aot_mode"
"""The `Mode` of one compilation, among Inductor's options."""

KEY_OPTION = "nvgemm_aot_key"
"""What choices depend on besides the mode, among Inductor's options; see `inductor.choices_key`."""

MAX_CHOICES_VARIABLE = "NVGEMM_AOT_MAX_CHOICES"
"""Most kernels that join the choices for one GEMM."""

DEFAULT_MAX_CHOICES = DEFAULT_JIT_CANDIDATES = 4

TRUST_VARIABLE = "NVGEMM_AOT_TRUST_RANKING"
"""1: kernels that were measured on this GPU product are not timed again; see `trust`."""

GRAPHS_VARIABLE = "NVGEMM_AOT_CUDA_GRAPHS"
"""1: the program records its compiled calls in CUDA graphs itself; see `choice_timing`."""

DEFAULT_MODE_VARIABLE = "NVGEMM_AOT_DEFAULT_MODE"
"""0: without max-autotune, torch's code stays as it is; see `inductor.default_mode`."""

REPEATED_VARIABLE = "NVGEMM_AOT_REPEATED_RANKINGS"
"""1: in default mode, what one GPU repeated counts as what two confirm; see `matching.evidence`."""

RECORD_VARIABLE = "NVGEMM_AOT_RECORD"
"""Names the file that records every GEMM torch.compile asks choices for; see `recorder`."""

TARGET_VARIABLE = "NVGEMM_AOT_RECORD_TARGET"
"""The target of that recording, whatever device its GEMMs run on."""

KEEP_VARIABLE = "NVGEMM_AOT_KEEP_NVGEMM"
"""1 keeps the choices of torch's NVGEMM backend beside bundled kernels of the same operators."""

EXPLAIN_VARIABLE = "NVGEMM_AOT_EXPLAIN"
"""Names the file that `report` appends events to; nothing is written where it is not set."""

DEBUG_VARIABLE = "NVGEMM_AOT_DEBUG"
"""1: `grouped_mm`, `moe.experts`, and compiled code that is loaded while it is set, copy offsets
from the device and check them, for which they wait. Torch's operators and generated C++ do not."""

BUNDLES_VARIABLE = "NVGEMM_AOT_BUNDLES"
"""Names bundle files, or directories of them, as PATH does."""

CACHE_VARIABLE = "NVGEMM_AOT_CACHE"
"""Names the cache directory."""

CACHE_LIMIT_VARIABLE = "NVGEMM_AOT_CACHE_LIMIT"
"""Most bytes that run-time compiling leaves in the cache directory."""

COMPILE_TIMEOUT_VARIABLE = "NVGEMM_AOT_COMPILE_TIMEOUT"
"""Seconds after which the compiler of a kernel is killed."""

JIT_CANDIDATES_VARIABLE = "NVGEMM_AOT_JIT_CANDIDATES"
"""Most kernels to compile for one problem; 0 compiles none."""

JIT_JOBS_VARIABLE = "NVGEMM_AOT_JIT_JOBS"
"""Most compiler processes, over all user processes of a cache directory."""

JIT_PROVIDER_VARIABLE = "NVGEMM_AOT_JIT_PROVIDER"
"""Another source of kernels than the product's, as ``module:class``."""

_log = logging.getLogger(__name__)


def default_mode() -> Mode:
    """The mode that the environment asks for.

    Raises:
        SettingError: If it is none: a misspelt ``required`` must not be taken as ``auto``.
    """
    return checked_mode(named_mode(), COMPILE_OPTION)


def named_mode() -> str:
    """The text that names the mode of this process, which may be none."""
    return os.environ.get(MODE_VARIABLE) or Mode.AUTO.value


def checked_mode(name: object, where: str) -> Mode:
    """The mode of a name.

    Args:
        name: The name.
        where: What it was given to, where it is not the environment's.

    Raises:
        SettingError: If no mode has this name.
    """
    try:
        return Mode(name)
    except ValueError:
        pass
    from .errors import SettingError  # not imported at torch's import

    allowed = ", ".join(mode.value for mode in Mode)
    if name == os.environ.get(MODE_VARIABLE):
        raise SettingError(f"{MODE_VARIABLE}={shown(str(name))}: allowed are {allowed}")
    raise SettingError(f"{where} is {shown(repr(name))}; allowed are {allowed}")


def is_off() -> bool:
    """Whether the user has turned the plug-in off for the whole process. Never raises."""
    return named_mode() == Mode.OFF.value


def max_choices() -> int:
    """Most kernels to offer for one GEMM."""
    return _number(MAX_CHOICES_VARIABLE, DEFAULT_MAX_CHOICES)


def jit_candidates() -> int:
    """Most kernels to compile at run time for one problem."""
    return _number(JIT_CANDIDATES_VARIABLE, DEFAULT_JIT_CANDIDATES)


def _number(variable: str, default: int) -> int:
    """A variable's value; one that is no number counts as not set."""
    text = os.environ.get(variable)
    if not text:
        return default
    number = whole_number(text)
    if number is None:
        _warn_once(f"{variable}={shown(text)}: must be a number, 0 or more; taken as {default}")
        return default
    return number


def whole_number(text: str) -> int | None:
    """The number that a setting is, 0 or more; None for any other text, and for absurd ones."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


MOST_DIGITS = 18
"""Of a setting. Python refuses to convert thousands of digits."""

_MOST_SHOWN = 100
"""Most characters of a value that a message repeats."""

_MOST_SHOWN_OF_PATHS = 500


def shown_path(path: os.PathLike[str] | str) -> str:
    """A path for a message, as `shown`, with more characters: its end says most."""
    return shown(os.fspath(path), _MOST_SHOWN_OF_PATHS)


def shown(value: str, most: int = _MOST_SHOWN) -> str:
    """A setting's value for a message: one printable line, cut where it is long."""
    start = value[:most]
    line = "".join(one if one.isprintable() else "?" for one in " ".join(start.split()))
    left = len(value) - len(start)
    return f"{line}… ({left} more characters)" if left else line


def trusts_rankings() -> bool:
    """Whether measured rankings decide alone."""
    return _switch(TRUST_VARIABLE)


def serves_default_mode() -> bool:
    """Whether measured kernels join graphs that are compiled without max-autotune."""
    return _switch(DEFAULT_MODE_VARIABLE, unset="1")


def counts_repeated_rankings() -> bool:
    """Whether, in default mode, repeated rankings count from the gain of confirmed ones on."""
    return _switch(REPEATED_VARIABLE)


def records_graphs() -> bool:
    """Whether the user's program records calls in CUDA graphs, of which Inductor knows nothing."""
    return _switch(GRAPHS_VARIABLE)


def _switch(variable: str, *, unset: str = "0") -> bool:
    """Whether a variable is 1; a value that is neither 0 nor 1 counts as not set."""
    text = os.environ.get(variable) or unset
    if text not in ("0", "1"):
        _warn_once(f"{variable}={shown(text)}: allowed are 0, 1; taken as {unset}")
        text = unset
    return text == "1"


def is_debugging() -> bool:
    """Whether the user asks for checks that wait for the device."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def keeps_nvgemm() -> bool:
    """Whether torch's NVGEMM choices stay beside bundled kernels of the same operators."""
    return os.environ.get(KEEP_VARIABLE) == "1"


def choosing_key() -> str:
    """The settings that change which choices there are for a GEMM, as part of a cache's key."""
    switches = (
        trusts_rankings(),
        keeps_nvgemm(),
        records_graphs(),
        serves_default_mode(),
        counts_repeated_rankings(),
    )
    return " ".join(map(str, (max_choices(), *map(int, switches))))


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


VARIABLES = {
    MODE_VARIABLE: (
        "`auto` (the default), `required` or `off`: what torch.compile may do with bundled "
        "kernels. Any other value is an error at the first GEMM."
    ),
    MAX_CHOICES_VARIABLE: (
        "Most bundled kernels that join the choices for one GEMM; 4 if not set. Fewer compile "
        "sooner; `0` offers none."
    ),
    TRUST_VARIABLE: (
        "`1`: what `nvgemm-aot tune` measured on this GPU product is not timed again. Triton "
        "still is, if it is a backend and was not measured."
    ),
    GRAPHS_VARIABLE: (
        "`1`: the program records its compiled calls in CUDA graphs itself, as serving engines do, "
        "so launches never count when choices are timed. Without it that holds where Inductor "
        "makes the graphs, and where ATEN alone competes."
    ),
    DEFAULT_MODE_VARIABLE: (
        "`0`: no bundled kernels without max-autotune. If not set, plain torch.compile uses the "
        "kernels that `nvgemm-aot tune` measured to be faster than ATen: on two GPUs of this "
        "product, or repeatedly on one and by 8 % or more. It takes them by the sizes of each "
        "call; nothing is timed and nothing compiled."
    ),
    REPEATED_VARIABLE: (
        "`1`: without max-autotune, rankings that one GPU of this product repeated count from a "
        "gain of 2 % on ATen on, as those that two GPUs confirm; if not set, from 8 % on. Set it "
        "for every process of a job, or for none."
    ),
    RECORD_VARIABLE: (
        "A file in which every GEMM that torch.compile meets is kept, as a manifest."
    ),
    TARGET_VARIABLE: (
        "The target of the recorded manifest, if not the GPU in use: `sm_90a`, `sm_100a`, "
        "`sm_100f` or `sm_103a`. Platform and CUDA version are those of the process, unless named "
        "too, as in `sm_90a-linux_aarch64-cu12`."
    ),
    KEEP_VARIABLE: (
        "`1`: keeps the choices of torch's own NVGEMM backend beside bundled kernels of the same "
        "operators."
    ),
    EXPLAIN_VARIABLE: (
        "A file to which events are appended, one line of JSON each: every GEMM, its times, and "
        "each call of a bundled kernel in generated code."
    ),
    BUNDLES_VARIABLE: (
        "Bundle files, or directories of them, besides those of installed wheels; separated by "
        "`:`. It is read once, when a process first compiles or asks for a kernel. Others must not "
        "be able to write to them or to a directory above."
    ),
    DEBUG_VARIABLE: (
        "`1`: `nvgemm_runtime.grouped_mm`, `k_grouped_mm`, `gathered_grouped_mm`, which checks its "
        "rows too, and `moe.experts`, which checks counts and indices too, and compiled code that "
        "is loaded while it is set, copy offsets from the device and check them. Each call waits "
        "for that, so no CUDA graph can be captured. `torch.ops.nvgemm_aot.grouped_mm` never "
        "checks; in generated C++, ATen computes grouped products. Unchecked offsets that fall, or "
        "pass the end, go unnoticed, and memory outside the operands may be read and written."
    ),
    CACHE_VARIABLE: (
        "The cache directory of builds and of kernels compiled at run time; `nvgemm-aot` in "
        "`$XDG_CACHE_HOME` or `~/.cache` if not set."
    ),
    CACHE_LIMIT_VARIABLE: (
        "The size to which run-time compiling keeps the cache directory: bytes, or a number "
        "followed by `K`, `M`, `G` or `T`; `1G` if not set."
    ),
    COMPILE_TIMEOUT_VARIABLE: (
        "Seconds after which the compiler of one kernel is killed, at run time and by `nvgemm-aot "
        "build`; 300 if not set."
    ),
    JIT_CANDIDATES_VARIABLE: (
        "Most kernels that are compiled at run time for one problem; 4 if not set, `0` compiles "
        "none."
    ),
    JIT_JOBS_VARIABLE: (
        "Most compiler processes of a cache directory, over all programs, though each program "
        "gets one. If not set: one for each core, and fewer if memory is short."
    ),
    JIT_PROVIDER_VARIABLE: (
        "Sources of kernels for run-time compiling, named as in a manifest's `providers`, with `+` "
        "between them. If not set: all that come with the package, but those whose packages are "
        "not installed as they need them, which one warning names."
    ),
}
"""Every variable of the project, by name: what the reference says of it, in Markdown."""
