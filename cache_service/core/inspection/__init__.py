"""Questions that change nothing.

Owns views, statistics, explanations of a match, and the audit of every invariant. May import tables, tiers, pool_state and all
below; nothing of calls or step.
"""
