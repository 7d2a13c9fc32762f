"""Divides a tuning among several GPUs, each with a part of the problems.

Imports the rest of tuning.
"""
