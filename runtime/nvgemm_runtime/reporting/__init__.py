"""Reports what a process does with its GEMMs: counts and events.

May import `settings` and `errors`.
"""
