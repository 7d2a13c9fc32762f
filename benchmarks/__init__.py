"""Benchmarks, run from the repository's root, and their results.

A folder is a benchmark, ``python -m benchmarks.hgemm``, or holds several on one subject: ``build``
(build costs) and ``runtime`` (costs of loading, look-ups and launches). `benchmarks.shared` has
common code. `benchmarks.record` defines result files, `benchmarks.cases` computes their records
from raw files, and `benchmarks.tables` and `benchmarks.figures` generate tables and figures from
``benchmarks/results``. docs/benchmarks/index.md explains each benchmark.
"""
