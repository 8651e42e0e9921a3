"""What the watches of a pool report.

Owns the feed of a pool (event_feed), what each watch has not read (watch), and what was reported of the tiers below the host
tier (lower_tier_view). Changes nothing of what it reports. May import core.index and core.values.
"""
