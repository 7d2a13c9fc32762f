"""Arithmetic, comparisons and conversions: what computes one lane's numbers."""
