"""The launcher of a kernel from tests/provider_package, called as the runtime calls it.

No GPU is needed: see `test_native_launchers`.
"""

from __future__ import annotations

import pytest
from test_native_launchers import PRELUDE, REACHES_CUDA

from fake_driver import FakeDriver
from foreign_packages import BuiltPackage

pytestmark = pytest.mark.slow


def test_its_launcher_takes_what_the_runtime_passes(
    built_package: BuiltPackage, driver: FakeDriver
) -> None:
    code = PRELUDE + (
        "from gemm_arguments import exact_arguments\n"
        "(kernel,) = bundle.header.kernels\n"
        "launch = library.load(bundle, kernel).launch\n"
        "for sizes in ((1, 1, 1), (3, 5, 7), (33, 65, 17), (128, 256, 512)):\n"
        "    arguments = exact_arguments(problem_of(kernel.signature, *sizes), 'cpu')\n"
        "    say(kernel, launch, *(on(one) for one in arguments.operands()))\n"
    )
    said = driver.run(code, str(built_package.bundle), capability=90).splitlines()
    assert len(said) == 4
    for line in said:
        assert REACHES_CUDA in line, line
