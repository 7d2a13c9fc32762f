"""Install commands for messages.

No registry has nvgemm-aot: a package with its name there could be somebody else's.
"""

from __future__ import annotations

UPGRADE = "upgrade: install a newer nvgemm-aot"
"""Next step if a newer release is needed."""


def install_command(extras: str = "", *, again: bool = False) -> str:
    """Returns the command that installs nvgemm-aot, followed by where to run it.

    Args:
        extras: Names of extras between commas, such as ``build``.
        again: True to replace the installed nvgemm-aot's files, and nothing else.
    """
    options = "--force-reinstall --no-deps " if again else ""
    target = f"'.[{extras}]'" if extras else "."
    return (
        f"pip install {options}{target} in nvgemm-aot's checkout, or with the path of its wheel in "
        "place of the dot"
    )
