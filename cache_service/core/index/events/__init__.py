"""What the watches of a pool are told.

Owns the feed of a pool (event_feed), what each watch has not read (watch), and what was told of the tiers below the host tier
(told_below). Changes nothing of what it tells of. May import core.index and core.values.
"""
