"""Checks kernels' results: operands with known results, and error bounds."""
