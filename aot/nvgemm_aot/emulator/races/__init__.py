"""Race detection: accesses that no fence, barrier or wait orders, and memory nobody has written.

Start at `detector.RaceDetector`, which `run.execute` uses unless told otherwise.
"""
