"""Reads bundles: the file, its header, and its payloads, each checked before use.

May import `gemm` and what is below it; not `matching` or what is above it. Start at `reader`;
`format` has the header's dataclasses, and FORMAT.md is the specification.
"""
