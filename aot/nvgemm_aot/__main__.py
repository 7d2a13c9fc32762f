"""Where the command begins, also as ``python -m nvgemm_aot``: with nothing that takes time."""

from __future__ import annotations

from .cli.interrupts import leave_at_once


def main() -> None:
    """Run the command with this process's arguments, and exit."""
    leave_at_once()
    from .cli.main import main as command

    command(prog_name="nvgemm-aot")


if __name__ == "__main__":
    main()
