"""Sequences and the sessions that hold them: the table of rows, its state transitions, spans, claims, publishing.

The table's columns are written by its own methods only. May import blocks, index, eviction and values.
"""
