"""Experts for other libraries, one module each: transformers and torchtitan.

Each imports its library; nothing here imports them.
"""
