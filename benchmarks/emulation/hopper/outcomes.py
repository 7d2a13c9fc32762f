"""Kinds of outcomes, by the words with which their texts begin."""

EQUAL, CLOSE, REFUSED, NOT_KEPT, DIFFERENT = OUTCOMES = (
    "equal",
    "close",
    "the GPU refuses",
    "not kept",
    "different",
)
"""Equal bit for bit; within a case's limit; the kernel fails on the GPU; too large a result to be
kept and its digest differs; and anything else, which is a fault of one of both."""
