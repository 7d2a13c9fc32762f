"""Parses PTX text into programs. Imports nothing of the emulator but its errors."""
