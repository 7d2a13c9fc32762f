"""Recordings: the GEMMs that a program meets, kept as a manifest.

May import `launch` and what is below it; not `inductor` or `jit`. Start at `recorder`; `text` is
the file's text, and `declarable` says which GEMMs a manifest can declare.
"""
