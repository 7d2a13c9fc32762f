"""Files, locks between processes, the build cache, and the private keys that sign entries.

May import no other room of this package. Start at `files`, which writes files whole or not at all,
and `build_cache`.
"""
