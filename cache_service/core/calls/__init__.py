"""Calls beside the step: creating and updating sequences, prefixes, room, sessions and their ends, background work.

Owns what each of these calls decides and changes. Each file is one group of calls, a class over PoolState.
May import step, inspection and all below. Of the groups only sessions and garbage use others: reclaim and maintenance.
"""
