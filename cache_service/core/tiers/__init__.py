"""The tiers below the device: their blocks, the orders between them, and sequences on their way.

Owns what is in flight. Every tier has the same verbs: lookup (what it has of a prompt), prepare_load and complete_load (orders
to the tier above, and their ends), prepare_store and complete_store (orders from there). Of the host tier they are the
Offloader's, whose orders name blocks of both tiers and are run by an engine; its lookup is the index's, which knows both. Which
evicted blocks it takes, admission decides. The
tiers behind it, a disk of the pool's own and a store that others share, are ContentTiers: they are asked by the name of
content, and their orders are run by threads. May import pool_state and all below it.
"""
