"""Modes, options, and what they add to the keys of torch's caches."""
