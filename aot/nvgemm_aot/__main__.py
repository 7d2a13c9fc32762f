"""Entry point of the command, also as ``python -m nvgemm_aot``. Imports nothing slow."""

from __future__ import annotations

from .cli.terminal.interrupts import leave_at_once


def main() -> None:
    """Runs the command with this process's arguments, and exits."""
    leave_at_once()
    from .cli.main import main as command

    command(prog_name="nvgemm-aot")


if __name__ == "__main__":
    main()
