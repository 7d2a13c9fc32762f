"""Writes bundles and wheels that hold them.

May import `verify`, for reading ELF, and lower layers; not `pipeline` or higher ones. Start at
`writer`, the only code that creates bundle files; FORMAT.md is the specification.
"""
