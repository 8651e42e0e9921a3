"""The effects of a step's items on block tables: look up, start, reserve, commit, fork, truncate, release.

Owns how items get, share and give up blocks, and the decision on copy-on-write (reserve). Every operation takes valid items
and cannot fail. Each file is a part over PoolState. May import tiers, pool_state and below.
"""
