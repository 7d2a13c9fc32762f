"""Proves from a kernel's object code that it is what its bundle says.

May import `providers`, `manifest`, `targets`, `storage`; not `build` or what is above it. Start at
`bundle`, which goes through the kernels of a bundle; `kernel` inspects one, and the other modules
read one kind of evidence each.
"""
