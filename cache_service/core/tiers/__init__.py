"""The tier below the device: its blocks, the transfer orders between the two, and sequences on their way.

Owns what is in flight. May import pool_state and all below.
"""
