"""The tiers below the device: their blocks, the orders between them, and sequences on their way.

Owns what is in flight. May import pool_state and all below.
"""
