"""``nvgemm-aot doctor``: the command and the checks behind it."""
