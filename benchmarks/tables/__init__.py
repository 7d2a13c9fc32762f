"""Tables of the documents, generated from benchmarks/results.

    python -m benchmarks.tables           # renews the tables of the documents
    python -m benchmarks.tables --check   # fails if a table differs from the results

A page has a table between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""
