"""Measures what many machines and GPUs gain: tuning, a shared cache, builds over workers."""
