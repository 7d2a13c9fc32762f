"""Blackwell's tensor cores (PTX ISA, "TensorCore 5th Generation Family Instructions").

Multiplications and copies to tensor memory take effect late, in the order of their issue.
"""
