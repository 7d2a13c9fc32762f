"""Commands that messages give to install nvgemm-aot itself.

No registry has it: its name there could be somebody else's package.
"""

from __future__ import annotations

UPGRADE = "upgrade: install a newer nvgemm-aot"
"""Next step where a newer release is needed."""


def install_command(extras: str = "", *, again: bool = False) -> str:
    """Command that installs nvgemm-aot, followed by where to run it.

    Args:
        extras: Names of extras between commas, such as ``build``.
        again: Replace the files of the installed nvgemm-aot, and nothing else.
    """
    options = "--force-reinstall --no-deps " if again else ""
    what = f"'.[{extras}]'" if extras else "."
    return (
        f"pip install {options}{what} in nvgemm-aot's checkout, or with the path of its wheel in "
        "place of the dot"
    )
