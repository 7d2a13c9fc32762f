"""``nvgemm-aot keygen`` and ``sign``, and who signed what other commands show or write."""
