"""From tokens to a block: the prefix tree, stored logits, what left it and why, and the events that tell of it.

Knows tokens and block ids, no sequence.
"""
