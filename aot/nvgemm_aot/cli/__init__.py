"""The ``nvgemm-aot`` command: parses arguments, prints, and maps errors to exit codes.

May import every other room; none imports it. Start at `main`, the group of commands; larger
commands have modules of their own, ``render_*`` make what they print.
"""
