"""``nvgemm-aot inspect``, ``verify``, ``list``, ``wheel``, ``merge`` and ``split``."""
