"""Proves from a kernel's object code that it is what its bundle says.

May import `providers`, `manifest`, `targets`, `storage`; not `build` or what is above it. Start at
`bundle`, which inspects the kernels of a bundle; `kernel` inspects one, and each of the other
modules reads one kind of evidence.
"""
