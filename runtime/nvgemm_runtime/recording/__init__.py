"""Records a program's GEMMs as a manifest.

May import `launch` and lower rooms, but not `inductor` or `jit`. Start at `recorder`. `text` is the
file's text, and `declarable` decides which GEMMs a manifest can declare.
`file_locks` keeps processes that write one file apart.
"""
