from __future__ import annotations

import re

import pytest

from nvgemm_runtime.errors import install_command
from repository import ROOT

_OF_A_REGISTRY = re.compile(r"pip install [^\n]*?nvgemm[-_](aot|kernels)(?!'s|[\w-]*\*?\.whl)")


@pytest.mark.parametrize("folder", ["aot", "runtime", "wheels"])
def test_no_message_installs_by_a_name_that_no_registry_has(folder: str) -> None:
    """Lines of sources that tell somebody to install this project's packages by name."""
    sources = [path for kind in ("*.py", "*.cpp", "*.in") for path in (ROOT / folder).rglob(kind)]
    assert sources
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sources
        for match in _OF_A_REGISTRY.finditer(path.read_text())
    ]
    assert found == []


def test_extras_and_a_repair_are_installed_from_the_checkout() -> None:
    assert install_command().startswith("pip install . in nvgemm-aot's checkout")
    assert install_command("build,cross").startswith("pip install '.[build,cross]' in ")
    assert install_command(reinstall=True).startswith(
        "pip install --force-reinstall --no-deps . in "
    )
