"""Calls beside the step: creating and updating sequences, prefixes, room, sessions and their ends, background work.

Owns the calls that are no step, each file one group of them, a class over PoolState. May import step, inspection and all below.
Of the groups only sessions and garbage use others: reclaim and maintenance.
"""
