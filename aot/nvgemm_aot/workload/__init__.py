"""Finds a program's GEMMs and checks which ones bundles serve.

May import `pipeline` and lower rooms; not `jit`, `tuning` or `cli`. Start at `record_program`,
which runs a command and records its GEMMs, and `coverage`, which compares them with bundles.
"""
