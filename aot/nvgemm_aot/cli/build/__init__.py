"""``nvgemm-aot build``: the command, its wheels, and its notes on rankings."""
