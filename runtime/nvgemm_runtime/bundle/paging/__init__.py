"""Headers in pages: a small root, and entries that are read and checked when they are needed.

Format version 3, for large bundles. `root` reads the root, and `tables` its tables; `paged_header`
reads entries, `grouped_header` offers the same look-ups over a whole header, and `encode_pages`
writes.
"""
