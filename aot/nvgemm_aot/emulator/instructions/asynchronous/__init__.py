"""Memory barriers, bulk copies and the cancelling of clusters.

Each instruction's effects go through the grid's late queues, and complete at a memory barrier or in
a bulk group.
"""
