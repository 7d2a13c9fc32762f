"""Reads and checks a kernel's device code."""
