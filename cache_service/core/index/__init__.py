"""From tokens to blocks.

Owns the prefix tree (prefix_index), which tree is whose (roots), which nodes are whose children (node_links), which blocks its
nodes have by group of layers (node_blocks), the logits stored with nodes, the log of nodes that left it and why (eviction_log),
what the tiers below the host tier have (below_blocks), the log of changes while the pool is watched (change_log), and estimates
of what an index without an end would find (reach), and pools of other sizes (hit_curve). What watches report is in `events`.
Knows tokens and block ids, no sequences. May import core.values.
"""
