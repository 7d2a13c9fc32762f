"""User settings by environment variable; `VARIABLES` describes each."""

from __future__ import annotations

import enum
import functools
import logging
import os


class Mode(str, enum.Enum):
    """Modes in which torch.compile uses bundled kernels."""

    AUTO = "auto"
    """Uses bundled kernels; under max-autotune, may compile others at run time."""
    REQUIRED = "required"
    """Compiles nothing. Under max-autotune, a GEMM without a bundled kernel is an error; without
    max-autotune, a declared GEMM whose kernel cannot be used is."""
    OFF = "off"
    """Disables the plug-in."""


MODE_VARIABLE = "NVGEMM_AOT"
"""`Mode` of the process; ``auto`` if unset."""

COMPILE_OPTION = "nvgemm_aot_mode"
"""`Mode` of a single compilation, among Inductor's options."""

KEY_OPTION = "nvgemm_aot_key"
"""Key for everything that choices depend on besides the mode, among Inductor's options; see
`inductor.configuration.choices_key`."""

FUSE_VARIABLE = "NVGEMM_AOT_FUSE"
"""1: in default mode, a kernel may compute a gated product and its gate, which rounds once; see
`inductor.fusion.measured_gates`."""

FUSE_OPTION = "nvgemm_aot_fuse"
"""The same for a single compilation, among Inductor's options."""

MAX_CHOICES_VARIABLE = "NVGEMM_AOT_MAX_CHOICES"
"""Most kernels that join a GEMM's choices."""

DEFAULT_MAX_CHOICES = DEFAULT_JIT_CANDIDATES = 4

TRUST_VARIABLE = "NVGEMM_AOT_TRUST_RANKING"
"""1: kernels measured on this GPU product are not timed again; see `trust`."""

GRAPHS_VARIABLE = "NVGEMM_AOT_CUDA_GRAPHS"
"""1: the program records its compiled calls in CUDA graphs itself; see `choice_timing`."""

DEFAULT_MODE_VARIABLE = "NVGEMM_AOT_DEFAULT_MODE"
"""0: without max-autotune, torch's code stays unchanged; see `inductor.default_mode`."""

REPEATED_VARIABLE = "NVGEMM_AOT_REPEATED_RANKINGS"
"""1: in default mode, repeated rankings count like confirmed ones; see `matching.evidence`."""

RECORD_VARIABLE = "NVGEMM_AOT_RECORD"
"""File that records every GEMM for which torch.compile asks for choices; see `recorder`."""

TARGET_VARIABLE = "NVGEMM_AOT_RECORD_TARGET"
"""Target of that recording, regardless of the device."""

KEEP_VARIABLE = "NVGEMM_AOT_KEEP_NVGEMM"
"""1 keeps the choices from torch's NVGEMM backend besides bundled kernels for the same
operators."""

EXPLAIN_VARIABLE = "NVGEMM_AOT_EXPLAIN"
"""File that `events` appends to; without it, no events."""

DEBUG_VARIABLE = "NVGEMM_AOT_DEBUG"
"""1: `grouped_mm`, `moe.experts`, and compiled code loaded while it is set, copy offsets from the
device and check them, which waits for the device. Torch's operators and generated C++ do not."""

BUNDLES_VARIABLE = "NVGEMM_AOT_BUNDLES"
"""Bundle files, or directories with them, separated as in PATH."""

CONFIRMED_VARIABLE = "NVGEMM_AOT_CONFIRMED"
"""Directory with this user's confirmations; see `installed.confirmed_files`."""

CACHE_VARIABLE = "NVGEMM_AOT_CACHE"
"""Cache directory."""

CACHE_LIMIT_VARIABLE = "NVGEMM_AOT_CACHE_LIMIT"
"""Most bytes that run-time compiling leaves in the cache directory."""

POLICY_VARIABLE = "NVGEMM_AOT_POLICY"
"""File with the keys whose signatures count; see `installed.policy`."""

SIGNING_KEY_VARIABLE = "NVGEMM_AOT_SIGNING_KEY"
"""File with the private key that signs what this process writes for others."""

REMOTE_CACHE_VARIABLE = "NVGEMM_AOT_REMOTE_CACHE"
"""URL of a cache that many machines share."""

REMOTE_CACHE_MODE_VARIABLE = "NVGEMM_AOT_REMOTE_CACHE_MODE"
"""``read``: nothing is written to the remote cache."""

REMOTE_CACHE_TRUST_VARIABLE = "NVGEMM_AOT_REMOTE_CACHE_TRUST"
"""1: without a policy, entries of the remote cache need no signature."""

REMOTE_CACHE_TIMEOUT_VARIABLE = "NVGEMM_AOT_REMOTE_CACHE_TIMEOUT"
"""Longest time of an operation of the remote cache, in seconds."""

_REMOTE_CACHE_SECONDS = 10.0

COMPILE_TIMEOUT_VARIABLE = "NVGEMM_AOT_COMPILE_TIMEOUT"
"""Seconds after which a kernel's compiler is killed."""

JIT_CANDIDATES_VARIABLE = "NVGEMM_AOT_JIT_CANDIDATES"
"""Most kernels to compile for a problem; 0 compiles none."""

JIT_JOBS_VARIABLE = "NVGEMM_AOT_JIT_JOBS"
"""Most compiler processes, over all user processes that share a cache directory."""

JIT_PROVIDER_VARIABLE = "NVGEMM_AOT_JIT_PROVIDER"
"""Provider to use instead of the default ones, as ``module:class``."""

_log = logging.getLogger(__name__)


def default_mode() -> Mode:
    """Returns the mode set in the environment.

    Raises:
        SettingError: If it is invalid: a misspelt ``required`` must not be taken as ``auto``.
    """
    return checked_mode(named_mode(), COMPILE_OPTION)


def named_mode() -> str:
    """Returns the text that names this process's mode; it may be invalid."""
    return os.environ.get(MODE_VARIABLE) or Mode.AUTO.value


def checked_mode(name: object, where: str) -> Mode:
    """Returns the mode with a name.

    Args:
        name: Mode name.
        where: Option that received the name, unless it is the environment's.

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
        raise SettingError(f"{MODE_VARIABLE}={printable(str(name))}: allowed are {allowed}")
    raise SettingError(f"{where} is {printable(repr(name))}; allowed are {allowed}")


def is_off() -> bool:
    """Returns True if the user has disabled the plug-in for the whole process. Never raises."""
    return named_mode() == Mode.OFF.value


def max_choices() -> int:
    """Returns the most kernels to offer for a GEMM."""
    return _number(MAX_CHOICES_VARIABLE, DEFAULT_MAX_CHOICES)


def jit_candidates() -> int:
    """Returns the most kernels to compile at run time for a problem."""
    return _number(JIT_CANDIDATES_VARIABLE, DEFAULT_JIT_CANDIDATES)


def _number(variable: str, default: int) -> int:
    """Returns a variable's value, or the default for anything but a number."""
    text = os.environ.get(variable)
    if not text:
        return default
    number = whole_number(text)
    if number is None:
        _warn_once(f"{variable}={printable(text)}: must be a number, 0 or more; taken as {default}")
        return default
    return number


def whole_number(text: str) -> int | None:
    """Returns a setting's number, 0 or more; None for other texts and too many digits."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


MOST_DIGITS = 18
"""Most digits in a setting. Python refuses to convert thousands."""

_MOST_SHOWN = 100
"""Most characters of a value that a message repeats."""

_MOST_SHOWN_OF_PATHS = 500


def printable_path(path: os.PathLike[str] | str) -> str:
    """Returns a path for a message, as `printable` does, but longer: its end says most."""
    return printable(os.fspath(path), _MOST_SHOWN_OF_PATHS)


def printable(value: str, most: int = _MOST_SHOWN) -> str:
    """Returns a setting's value for a message: one printable line, cut if long."""
    start = value[:most]
    line = "".join(
        character if character.isprintable() else "?" for character in " ".join(start.split())
    )
    omitted = len(value) - len(start)
    return f"{line}… ({omitted} more characters)" if omitted else line


def trusts_rankings() -> bool:
    """Returns True if measured rankings decide alone."""
    return _switch(TRUST_VARIABLE)


def serves_default_mode() -> bool:
    """Returns True if measured kernels join graphs compiled without max-autotune."""
    return _switch(DEFAULT_MODE_VARIABLE, unset="1")


def counts_repeated_rankings() -> bool:
    """Returns True if, in default mode, repeated rankings need only a confirmed one's gain."""
    return _switch(REPEATED_VARIABLE)


def fuses_gates() -> bool:
    """Returns True if gated products may be fused without max-autotune."""
    return _switch(FUSE_VARIABLE)


def records_graphs() -> bool:
    """Returns True if the program records calls in CUDA graphs, unknown to Inductor."""
    return _switch(GRAPHS_VARIABLE)


def _switch(variable: str, *, unset: str = "0") -> bool:
    """Returns True if a variable is 1; values other than 0 and 1 count as unset."""
    text = os.environ.get(variable) or unset
    if text not in ("0", "1"):
        _warn_once(f"{variable}={printable(text)}: allowed are 0, 1; taken as {unset}")
        text = unset
    return text == "1"


def trusts_remote_cache() -> bool:
    """Returns True if everyone who can write the remote cache is trusted."""
    return _switch(REMOTE_CACHE_TRUST_VARIABLE)


def remote_cache_timeout() -> float:
    """Returns the longest time of an operation of the remote cache, in seconds."""
    text = os.environ.get(REMOTE_CACHE_TIMEOUT_VARIABLE)
    if not text:
        return _REMOTE_CACHE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        _warn_once(
            f"{REMOTE_CACHE_TIMEOUT_VARIABLE}={printable(text)}: must be 0.1 to 3600 seconds; "
            f"taken as {_REMOTE_CACHE_SECONDS:g}"
        )
        return _REMOTE_CACHE_SECONDS
    return seconds


def is_debugging() -> bool:
    """Returns True if the user asks for checks that wait for the device."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def keeps_nvgemm() -> bool:
    """Returns True if torch's NVGEMM choices stay, besides bundled kernels for the operators."""
    return os.environ.get(KEEP_VARIABLE) == "1"


def choosing_key() -> str:
    """Returns the settings that change a GEMM's choices, as part of a cache key."""
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
        "Mode of bundled kernels under torch.compile and in `nvgemm_runtime.linear`: `auto` (the "
        "default), `required` or `off`. Any other value is an error at the first GEMM."
    ),
    MAX_CHOICES_VARIABLE: (
        "Most bundled kernels that join a GEMM's choices; 4 if not set. Fewer compile sooner; `0` "
        "offers none."
    ),
    TRUST_VARIABLE: (
        "`1`: kernels that `nvgemm-aot tune` measured on this GPU product are not timed again. "
        "Triton still is, if it is a backend and was not measured."
    ),
    GRAPHS_VARIABLE: (
        "`1`: the program records its compiled calls in CUDA graphs itself, as serving engines do, "
        "so launch time never counts when choices are timed. If not set, launch time is left out "
        "only where Inductor makes the graphs, or ATEN alone competes."
    ),
    DEFAULT_MODE_VARIABLE: (
        "`0`: no bundled kernels without max-autotune, nor in `nvgemm_runtime.linear`. If not set, "
        "plain torch.compile uses the kernels that `nvgemm-aot tune` measured as faster than ATen: "
        "on two GPUs of this product, or repeatedly on one and by 8 % or more. Each call "
        "dispatches by its sizes; nothing is timed or compiled."
    ),
    REPEATED_VARIABLE: (
        "`1`: without max-autotune, rankings repeated on one GPU of this product need a gain of "
        "2 % over ATen, like rankings that two GPUs confirm; if not set, they need 8 %. Set it for "
        "every process of a job, or for none."
    ),
    FUSE_VARIABLE: (
        "`1`: without max-autotune too, one kernel computes a gated MLP's product and its gate "
        "where `nvgemm-aot tune` measured that as faster. It rounds once, stock torch twice. Set "
        "it for every process of a job, or for none; for one `torch.compile`, set the option "
        "`nvgemm_aot_fuse`."
    ),
    RECORD_VARIABLE: ("A file that records every GEMM that torch.compile compiles, as a manifest."),
    TARGET_VARIABLE: (
        "The target of the recorded manifest, if not the GPU in use: an architecture such as "
        "`sm_90a`. Platform and CUDA version are those of the process, unless named too, as in "
        "`sm_90a-linux_aarch64-cu12`."
    ),
    KEEP_VARIABLE: (
        "`1`: keeps choices from torch's NVGEMM backend in addition to bundled kernels for the "
        "same operators."
    ),
    EXPLAIN_VARIABLE: (
        "A file for events, one line of JSON each: every GEMM, its times, and each call of a "
        "bundled kernel in generated code."
    ),
    BUNDLES_VARIABLE: (
        "Bundle files, or directories with bundles, in addition to installed wheels; separated by "
        "`:`. Read once, when a process first compiles or asks for a kernel. Other users must not "
        "have write access to them or to a directory above. Files that `nvgemm-aot confirm` wrote "
        "may be named likewise."
    ),
    CONFIRMED_VARIABLE: (
        "The directory in which `nvgemm-aot confirm` writes, and every process reads, this user's "
        "confirmations; `nvgemm-aot` in `$XDG_CONFIG_HOME` or `~/.config` if not set. Set it for "
        "every process of a job, or for none."
    ),
    DEBUG_VARIABLE: (
        "`1`: checks offsets of grouped products in `nvgemm_runtime.grouped_mm`, `k_grouped_mm`, "
        "`gathered_grouped_mm` (rows too), `moe.experts` (counts and indices too), and compiled "
        "code that is loaded while it is set. Each call copies them from the device and waits, so "
        "no CUDA graph can be captured. `torch.ops.nvgemm_aot.grouped_mm` never checks; in "
        "generated C++, ATen computes grouped products. Without checks, offsets that fall or pass "
        "the end go unnoticed, and memory outside the operands may be read and written."
    ),
    CACHE_VARIABLE: (
        "The cache directory of builds and of kernels compiled at run time; `nvgemm-aot` in "
        "`$XDG_CACHE_HOME` or `~/.cache` if not set."
    ),
    CACHE_LIMIT_VARIABLE: (
        "Size limit that run-time compiling keeps for the cache directory: bytes, or a number "
        "followed by `K`, `M`, `G` or `T`; `1G` if not set."
    ),
    COMPILE_TIMEOUT_VARIABLE: (
        "Seconds after which a kernel's compiler is killed, at run time and in `nvgemm-aot build`; "
        "300 if not set."
    ),
    POLICY_VARIABLE: (
        "A YAML file with the keys whose signatures count. With it, bundles, rankings files and "
        "confirmations must be signed, unless it says `required: false`. Other users must not have "
        "write access to it or to a directory above."
    ),
    SIGNING_KEY_VARIABLE: (
        "A file with a private key, as `nvgemm-aot keygen` writes it. It signs what `build`, "
        "`tune`, `confirm`, `merge`, `split`, `rankings export` and `rankings merge` write, the "
        "parts of a signed bundle that `wheel` splits, and what builds write into a remote cache."
    ),
    REMOTE_CACHE_VARIABLE: (
        "A cache that many machines share, behind each one's own: `redis://…`, `rediss://…`, "
        "`s3://bucket/prefix` or `file:///…`. Builds and run-time compiling take entries that a "
        "key of the policy signed."
    ),
    REMOTE_CACHE_MODE_VARIABLE: (
        "`read`: only reads the remote cache; `read-write` if not set. Without a signing key, "
        "it is only read anyway, unless the store is trusted and there is no policy."
    ),
    REMOTE_CACHE_TRUST_VARIABLE: (
        "`1`: without a policy, takes and writes remote entries that nobody signed. Everyone who "
        "can write the store then runs code on this machine."
    ),
    REMOTE_CACHE_TIMEOUT_VARIABLE: (
        "Longest time of an operation of the remote cache, in seconds; 10 if not set. Connecting "
        "takes 2 s at most."
    ),
    JIT_CANDIDATES_VARIABLE: (
        "Most kernels compiled at run time for a problem; 4 if not set, `0` compiles none."
    ),
    JIT_JOBS_VARIABLE: (
        "Most compiler processes per cache directory, over all programs; each program gets at "
        "least one. If not set: one per core, and fewer if memory is short."
    ),
    JIT_PROVIDER_VARIABLE: (
        "Providers for run-time compiling, named as in a manifest's `providers`, separated by `+`. "
        "If not set: all providers in the package. Those whose own packages are missing or do not "
        "fit are skipped with one warning."
    ),
}
"""Variables by name, with the reference's text in Markdown."""
