"""Files, locks between processes, and the build cache.

May import no other room of this package. Start at `files`, which writes files whole or not at all,
and `build_cache`.
"""
