"""Document tables, generated from benchmarks/results.

    python -m benchmarks.tables           # renews all tables
    python -m benchmarks.tables --check   # fails if a table differs from the results

A page has a table between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""
