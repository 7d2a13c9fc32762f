"""Merges bundles, and splits them into parts that each serve alone."""
