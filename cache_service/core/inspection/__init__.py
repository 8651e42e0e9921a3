"""Questions that change nothing: views, statistics, explanations of a match, and the audit of every invariant.

Owns no state, only the answers. May import tables, tiers, pool_state and all below; nothing of calls or step.
"""
