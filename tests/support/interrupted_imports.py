"""Programs that are interrupted at an import, as by Ctrl-C."""

from __future__ import annotations

INTERRUPT_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does

sys.meta_path.insert(0, Interrupt())
"""
"""Begins such a program; to be formatted with the name of the ``module``."""
