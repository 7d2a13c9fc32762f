"""``nvgemm-aot coverage``: the command, its CI gate, and its page."""
