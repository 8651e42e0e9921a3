"""From tokens to blocks.

Owns the prefix tree (prefix_index), the logits stored with its nodes, the log of nodes that left it and why (eviction_log), the
log of its changes while it is watched (change_log), and the events that watches read (event_feed). Knows tokens and block ids,
no sequences. May import core.values.
"""
