"""``nvgemm-aot explain`` and ``record``: commands that run a program of the user's."""
