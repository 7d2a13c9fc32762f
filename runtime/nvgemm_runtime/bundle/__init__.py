"""Reads bundles: the file, its header, and its payloads, each checked before use.

May import `gemm` and the rooms below it, but not `matching` or the rooms above it. Start at
`reader`; `format` and `ranking_entries` have the header's dataclasses, `paging` reads headers in
pages, and FORMAT.md is the specification.
"""
