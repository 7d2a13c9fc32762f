"""Benchmarks of builds and tuning over many machines."""
