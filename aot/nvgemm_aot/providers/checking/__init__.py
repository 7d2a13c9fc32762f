"""Checks what third-party providers return."""
