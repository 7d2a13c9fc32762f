"""Instructions that compute, move and order values without asynchronous units.

`computing` builds the meaning of those that depend on nothing but registers.
"""
