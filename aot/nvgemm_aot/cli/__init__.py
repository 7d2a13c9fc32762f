"""The ``nvgemm-aot`` command. No other package imports this one, and it may import all others.

Start at `main`, the group of commands. Each command has a module of its name with all that it
prints; `inspect`, `list`, `verify` and `wheel` are in `bundles`, `schema` in `manifest`. Modules
import at their top only what starts fast: torch, pydantic and the builder are imported by the
command that needs them.
"""
