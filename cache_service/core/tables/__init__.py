"""The items of a step that change block tables.

Owns look-up, start, reservation, commit, fork, truncation and release. Each takes lawful items and cannot fail; each file is a
part over PoolState. May import tiers, pool_state and below.
"""
