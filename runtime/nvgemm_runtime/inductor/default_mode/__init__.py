"""Chooses kernels by measured rankings, without autotuning."""
