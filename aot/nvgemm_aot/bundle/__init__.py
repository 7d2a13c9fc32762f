"""Writes bundles, and wheels of bundles.

May import `verify`, for reading ELF, and what is below it; not `build` or what is above it. Start
at `writer`, the only code that creates bundle files; FORMAT.md is the specification.
"""
