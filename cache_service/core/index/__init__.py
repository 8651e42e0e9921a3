"""From tokens to blocks.

Owns the prefix tree (prefix_index), the logits stored with its nodes, the log of nodes that left it and why (eviction_log), the
log of its changes while it is watched (change_log), the events that watches read (event_feed), and an estimate of what an
index without an end would find (reach). Knows tokens and block ids,
no sequences. May import core.values.
"""
