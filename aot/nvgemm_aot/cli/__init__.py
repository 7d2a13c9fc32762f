"""The ``nvgemm-aot`` command. It may import all other packages, and none imports it.

Start at `main`, the group of commands. Each command has a module or package named after it,
including all that it prints; `inspect`, `list`, `verify` and `wheel` are in `bundles`, `schema` in
`manifest`. Only imports that start fast are at the top; a command imports torch, pydantic and the
builder when it needs them.
"""
