"""Loads kernels into a process and onto devices."""
