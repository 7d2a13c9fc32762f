"""Proves from a kernel's object code that its bundle entry is true.

May import `providers`, `manifest`, `targets` and `storage`, but not `pipeline` or rooms above.
Start at `bundle`, which inspects a bundle's kernels. `kernel_inspection` inspects one kernel, and
each other module reads one kind of evidence.
"""
