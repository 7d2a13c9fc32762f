"""The calling conventions of compiled kernels against their own launchers, where no GPU is.

A compiled kernel checks its arguments before it calls CUDA. So a call that is wrong ends in its
message, and one that is right gets as far as CUDA, which the stand-in for the driver is not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fake_driver import FakeDriver
from launcher_scripts import PRELUDE, REACHES_CUDA
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.reader import Bundle
from row_kernels import ROWS, compile_rows, write_kernels


@pytest.fixture(scope="module")
def every_convention(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel for sm_100f of each calling convention, and of each rank and shape of operands."""
    names = {}
    # Rows of A first: of a matrix by columns, fewer m are multiples of 16 bytes.
    for name, row in sorted(ROWS.items(), key=lambda of: "/tn/" not in of[1]["signature"]):
        if row["target"] == "sm_100f":
            names.setdefault((row["calling_convention"], *SHAPED.findall(row["signature"])), name)
    kernels = compile_rows(names.values(), kernel_cache).values()
    return write_kernels(tmp_path_factory.mktemp("launchers"), "sm_100f", kernels)


SHAPED = re.compile("^bmm|/(?:add|bias|fp32_tensor|fp32_row|e8m0_1x32|e4m3_1x16)")
"""What in a signature changes the shapes of what a kernel takes."""


@pytest.fixture(params=["plain", pytest.param("every convention", marks=pytest.mark.slow)])
def bundle(request: pytest.FixtureRequest, real_bundles: dict[str, Path]) -> Path:
    """Kernels for sm_100f: of two plain signatures always, of all among the slow tests."""
    if request.param == "plain":
        return real_bundles["sm_100f"]
    path: Path = request.getfixturevalue("every_convention")
    return path


def run(driver: FakeDriver, bundle: Path, script: str) -> dict[str, str]:
    """What a script says of each signature's kernel."""
    printed = driver.run(PRELUDE + script, str(bundle), capability=100)
    said = dict(line.split("|") for line in printed.splitlines())
    with Bundle(bundle) as opened:
        assert set(said) == {kernel.signature.key for kernel in opened.header.kernels}
    return said


@pytest.mark.parametrize("m", [128, 8])
def test_launchers_take_what_they_are_given(driver: FakeDriver, bundle: Path, m: int) -> None:
    said = run(driver, bundle, f"""
for kernel in bundle.header.kernels:
    say(kernel, library.load(bundle, kernel).launch, *tensors(kernel.signature, {m}))
""")  # fmt: skip
    for key, message in said.items():
        assert REACHES_CUDA in message, (key, message)


def test_row_wise_scales_may_be_of_any_number_of_rows_and_one_scale_anywhere(
    driver: FakeDriver, bundle: Path
) -> None:
    said = run(driver, bundle, """
for kernel in bundle.header.kernels:
    m = 3 if kernel.signature.layout.a_row_major else 8
    given = tensors(kernel.signature, m)
    if kernel.signature.scales is not None and not kernel.signature.scales.is_swizzled:
        n = given[1].shape[1]
        shapes = ((m, 1), (1, n)) if kernel.signature.scales.value == "fp32_row" else ((1,), (1,))
        for place, shape in zip((3, 4), shapes):
            first = 1 if shape == (1,) else 4  # of rows: aligned as operands are
            given[place] = on(torch.rand(max(shape) + 4)[first : first + max(shape)].view(shape))
    say(kernel, library.load(bundle, kernel).launch, *given)
""")  # fmt: skip
    for key, message in said.items():
        assert REACHES_CUDA in message, (key, message)


def test_launchers_notice_another_order(driver: FakeDriver, bundle: Path) -> None:
    """That the calls above get further is a finding: what is in the wrong place is refused."""
    said = run(driver, bundle, """
for kernel in bundle.header.kernels:
    loaded = library.load(bundle, kernel)
    convention = parse_calling_convention(kernel.calling_convention)
    address = lib.open_kernel(bundle.payload(kernel), convention.symbol, "again")
    turned = replace(convention, parameters=convention.parameters[1:] + convention.parameters[:1])
    handle = lib.register_kernel(
        id="turned " + kernel.id, function_address=address, signature=kernel.signature,
        alignment_bytes=kernel.alignment_bytes, target=bundle.header.target, convention=turned)
    say(kernel, lib.launch, handle, *tensors(kernel.signature, 128))
""")  # fmt: skip
    for key, message in said.items():
        assert "Mismatched" in message or "Invalid" in message, (key, message)


@pytest.mark.slow
def test_every_convention_is_among_them(every_convention: Path) -> None:
    with Bundle(every_convention) as opened:
        conventions = {kernel.calling_convention for kernel in opened.header.kernels}
    assert conventions == {
        "tvm_ffi:gemm(a,b,out,stream)",
        "tvm_ffi:gemm(a,b,stream,addend,out)",
        "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,out)",
        "tvm_ffi:gemm(a,b,stream,scale_a,scale_b,addend,out)",
        "tvm_ffi:gemm(a*,b*,scale_a*,scale_b*,out*,mnkl,stream)",
        "tvm_ffi:gemm(a,b,out,offsets,stream)",
    }
