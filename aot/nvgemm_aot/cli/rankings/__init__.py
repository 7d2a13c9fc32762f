"""``nvgemm-aot rankings`` and ``confirm``: commands for measurements outside bundles."""
