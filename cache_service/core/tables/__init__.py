"""What the items of a step do to block tables.

Owns looking up, starting, reserving, committing, forking, truncating and releasing. Every operation takes lawful items and
cannot fail. Each file is a part over PoolState. May import tiers, pool_state and below.
"""
