"""Tuning journals: outcomes in a file next to the output, which survives interruptions.

Imports the rankings, bundles, storage and the runtime.
"""
