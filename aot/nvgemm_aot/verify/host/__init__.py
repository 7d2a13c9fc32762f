"""Reads and checks a kernel's host code."""
