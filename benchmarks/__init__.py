"""Everything with a clock in it: benchmarks, run from the repository's root, and their results.

A folder is a benchmark, ``python -m benchmarks.hgemm``, or holds several of one subject: ``build``
(what building costs) and ``runtime`` (what loading, looking up and launching kernels costs).
`benchmarks.figures` draws what some of them measured, `benchmarks.shared` has what they share, and
``benchmarks/results`` holds what they printed. docs/benchmarks/index.md says what each takes.
"""
