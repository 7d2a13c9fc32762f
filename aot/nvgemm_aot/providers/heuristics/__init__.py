"""Estimates kernels' runtimes without a GPU, from models and fitted corrections."""
