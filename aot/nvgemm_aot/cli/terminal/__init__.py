"""Reads options and writes to the terminal, for all commands."""
