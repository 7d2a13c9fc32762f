"""Generates the C++ that calls bundled kernels."""
