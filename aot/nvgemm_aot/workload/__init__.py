"""Finds which GEMMs a program needs, and which of them bundles serve.

May import `build` and what is below it; not `jit`, `tuning` or `cli`. Start at `record`, which
runs a command and keeps its GEMMs, and `coverage`, which compares them with bundles.
"""
