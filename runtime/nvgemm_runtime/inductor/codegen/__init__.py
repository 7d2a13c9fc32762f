"""Generates the C++ that calls bundled kernels, and loads the operators that it calls."""
