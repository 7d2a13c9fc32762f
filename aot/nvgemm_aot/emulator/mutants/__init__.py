"""Kernels with one instruction changed, and whether the emulator notices.

Start at `recorded_launch.RecordedLaunch`, on which mutants run again and again.
"""
