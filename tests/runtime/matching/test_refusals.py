"""Which installed libraries kernels can be loaded beside, by what those export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import encode_bundle, write_bundle
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.imported_symbols import (
    DEVICE_SYMBOLS,
    EARLIER_SYMBOLS,
    FFI_SYMBOLS,
    NEWEST_RUN,
    needed_symbols,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.target import CUDA_VERSIONS
from nvgemm_runtime.matching.device import UNKNOWN_VERSION
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match, Miss
from nvgemm_runtime.matching.refusals import library_refusal, refusal, reinstall_command
from repository import ROOT, TESTS
from synthetic_content import synthetic_content
from synthetic_facts import B200, LIBRARY

DATA = TESTS / "data"
DISTRIBUTION = "nvidia-cutlass-dsl-libs-cu13"
(ERROR_HELPER,) = EARLIER_SYMBOLS
NAMES_ERRORS = "cuda_dialect_get_error_name"


ALL_DEVICE_SYMBOLS = DEVICE_SYMBOLS | EARLIER_SYMBOLS
"""What kernels from any release of this project import from the runtime library."""


def header(**toolchain: str) -> Header:
    """A header that does not state what is imported, as those of version 1."""
    base = synthetic_content(kernels=1, problems=1)
    made = encode_bundle(replace(base, toolchain={"ld": "2.40", **toolchain}))[1]
    return replace(made, imports=None)


@pytest.mark.parametrize("version", ["4.7.0", "4.8.1", "4.9.0", "5.1", UNKNOWN_VERSION])
def test_a_library_that_exports_everything_fits_whatever_its_version(version: str) -> None:
    library = replace(LIBRARY, version=version, exports=ALL_DEVICE_SYMBOLS | {"more"})
    built = header(**{DISTRIBUTION: "4.8.1"})
    assert library_refusal(built, library, FFI_SYMBOLS | {"more"}) is None


def test_a_library_that_was_not_looked_at_fits() -> None:
    assert library_refusal(header(), LIBRARY, None) is None


@pytest.mark.parametrize("symbol", sorted(ALL_DEVICE_SYMBOLS))
def test_each_symbol_of_the_runtime_library_is_needed(symbol: str) -> None:
    library = replace(LIBRARY, version="4.6.3", exports=ALL_DEVICE_SYMBOLS - {symbol})
    reason = library_refusal(header(**{DISTRIBUTION: "4.8.1"}), library, FFI_SYMBOLS)
    newest = "4.7" if symbol == ERROR_HELPER else "4.8.1"
    assert reason == (
        f"kernels import {symbol}, which the installed {DISTRIBUTION} 4.6.3 does not export; "
        f"run: pip install '{DISTRIBUTION}>={newest}'"
    )


@pytest.mark.parametrize("symbol", sorted(FFI_SYMBOLS))
def test_each_symbol_of_tvm_ffi_is_needed(symbol: str) -> None:
    library = replace(LIBRARY, exports=ALL_DEVICE_SYMBOLS)
    built = header(**{"apache-tvm-ffi": "0.1.15.post2"})
    assert library_refusal(built, library, FFI_SYMBOLS - {symbol}) == (
        f"kernels import {symbol}, which the installed apache-tvm-ffi does not export; "
        "run: pip install 'apache-tvm-ffi>=0.1.15.post2'"
    )


def test_without_a_known_version_the_next_step_names_the_range_of_the_extra() -> None:
    library = replace(LIBRARY, version=UNKNOWN_VERSION, exports=frozenset())
    reason = str(library_refusal(header(), library, None))
    assert f"which the installed {DISTRIBUTION} does not export" in reason
    assert reason.endswith(f"run: pip install '{DISTRIBUTION}>=4.5.2,<4.9'")


def test_a_damaged_library_is_refused_with_what_is_wrong() -> None:
    library = replace(LIBRARY, defect="it is truncated: 10 bytes, a table needs 64")
    reason = str(library_refusal(header(), library, None))
    assert "/lib.so, which kernels call, cannot be loaded: it is truncated: 10 bytes" in reason
    again = "run: pip install --force-reinstall --no-deps"
    assert reason.endswith(f"{again} '{DISTRIBUTION}=={library.version}'")
    unknown = str(library_refusal(header(), replace(library, version=UNKNOWN_VERSION), None))
    assert unknown.endswith(f"{again} '{DISTRIBUTION}>=4.5.2,<4.9'"), "the range of the extra"


@pytest.mark.parametrize(
    ("cuda", "command"),
    [
        ("cu12", "pip install 'nvidia-cutlass-dsl-libs-cu12>=4.5.2,<4.9'"),
        ("cu13", "pip install 'nvidia-cutlass-dsl-libs-cu13>=4.5.2,<4.9'"),
        ("cu14", "pip install 'nvidia-cutlass-dsl-libs-cu14'"),
    ],
)
def test_a_missing_library_is_brought_by_the_extra_of_its_cuda_version(
    cuda: str, command: str
) -> None:
    target = replace(header().target, cuda=cuda)
    reason = str(library_refusal(replace(header(), target=target), None, None))
    assert reason.startswith(f"libcute_dsl_runtime.so for {cuda}, which kernels call, is not")
    assert reason.endswith(f"run: {command}")


def test_the_range_is_that_of_the_extras() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for cuda in CUDA_VERSIONS:
        damaged = replace(LIBRARY, cuda=cuda, version=UNKNOWN_VERSION)
        requirement = reinstall_command(damaged).split()[-1].strip("'")
        assert f'{cuda} = ["{requirement}"]' in project
    assert f"<{NEWEST_RUN[0]}.{NEWEST_RUN[1] + 1}" in requirement


def test_devices_are_judged_by_both_libraries() -> None:
    built = header()
    library = replace(LIBRARY, exports=ALL_DEVICE_SYMBOLS)
    facts = replace(B200, runtime_library=library, ffi_exports=FFI_SYMBOLS)
    assert refusal(built, facts) is None
    lacking = replace(facts, ffi_exports=frozenset({"TVMFFIEnvGetStream"}))
    assert "TVMFFIErrorSetRaisedFromCStr" in str(refusal(built, lacking))
    lacking = replace(facts, runtime_library=replace(library, exports=frozenset()))
    assert ERROR_HELPER in str(refusal(built, lacking))


@pytest.mark.parametrize("version", [1, 2])
def test_a_bundle_that_states_its_imports_needs_those_and_an_older_one_all_that_are_known(
    version: int, tmp_path: Path
) -> None:
    path = DATA / "format-1" / "sm_90a.nvgemm"
    if version == 2:
        with Bundle(path) as old:
            path = tmp_path / "new.nvgemm"
            write_bundle(path, read_content(old))
    with Bundle(path) as bundle:
        built = bundle.header
    assert (built.imports is not None) == (version == 2)
    for kernel in built.kernels:
        assert kernel.imports is None
        assert needed_symbols(built, kernel).ffi == FFI_SYMBOLS
        named = needed_symbols(built, kernel).device
        assert named == ALL_DEVICE_SYMBOLS - ({NAMES_ERRORS} if version == 2 else set())


def test_a_stated_import_of_either_library_is_looked_up_there() -> None:
    built = replace(header(), imports=("TVMFFINew", "_cudaNew"))
    library = replace(LIBRARY, exports=frozenset({"_cudaNew"}))
    assert library_refusal(built, library, frozenset({"TVMFFINew"})) is None
    assert "import TVMFFINew, which" in str(library_refusal(built, library, FFI_SYMBOLS))
    library = replace(LIBRARY, exports=DEVICE_SYMBOLS)
    assert "import _cudaNew, which" in str(
        library_refusal(built, library, frozenset({"TVMFFINew"}))
    )


NOTHING = replace(LIBRARY, exports=frozenset())


def test_a_bundle_that_states_no_imports_at_all_needs_none() -> None:
    assert library_refusal(replace(header(), imports=()), NOTHING, frozenset()) is None
    assert library_refusal(header(), NOTHING, frozenset()) is not None


@pytest.mark.parametrize("symbol", ["memcpy", "__tls_get_addr", "pthread_create"])
def test_symbols_of_other_libraries_are_not_asked_of_these_two(symbol: str) -> None:
    assert library_refusal(replace(header(), imports=(symbol,)), NOTHING, frozenset()) is None


def with_imports(*of_kernels: tuple[str, ...] | None) -> Header:
    """A bundle that imports what all known kernels do, but for some of its kernels."""
    base = synthetic_content(kernels=len(of_kernels), problems=2)
    made = encode_bundle(base)[1]
    kernels = (replace(kernel, imports=own) for kernel, own in zip(made.kernels, of_kernels))
    common = tuple(sorted(DEVICE_SYMBOLS | FFI_SYMBOLS))
    return replace(made, imports=common, kernels=tuple(kernels))


GPU = replace(
    B200, runtime_library=replace(LIBRARY, exports=DEVICE_SYMBOLS), ffi_exports=FFI_SYMBOLS
)


@pytest.mark.parametrize("new", ["_cudaNew", "TVMFFINew"])
def test_a_kernel_that_imports_what_is_not_there_costs_itself_alone(new: str) -> None:
    built = with_imports(None, (new,), None)
    assert refusal(built, GPU) is None
    index = Index([BundleView(name="new", header=built)], GPU)
    (reason,) = index.refusals
    assert f"1 kernel is left out: kernels import {new}, which the installed" in reason
    for ranking in built.rankings:
        match = index.match(ranking.problem, 16)
        assert isinstance(match, Match)
        served = {one.kernel.id for one in match.kernels}
        assert served == {built.kernels[0].id, built.kernels[2].id}
        if ranking.measured is not None:
            assert match.measured is not None
            assert "1 of 3 measured kernels cannot be launched here" in match.measured.doubts


def test_a_kernel_of_an_older_library_is_used_though_the_others_cannot_be() -> None:
    facts = GPU  # its library is as those before 4.7
    earlier = tuple(sorted(ALL_DEVICE_SYMBOLS | FFI_SYMBOLS))
    built = with_imports(earlier, None, earlier)
    match = Index([BundleView(name="mixed", header=built)], facts).match(
        built.rankings[0].problem, 16
    )
    assert isinstance(match, Match)
    assert {one.kernel.id for one in match.kernels} == {built.kernels[1].id}
    none = Index([BundleView(name="old", header=with_imports(earlier, earlier))], facts)
    miss = none.match(built.rankings[0].problem, 16)
    assert isinstance(miss, Miss)
    assert any(ERROR_HELPER in reason for reason in miss.reasons)
