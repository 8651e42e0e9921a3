"""One iteration of an engine: validate decides whether all of it is lawful, apply carries it out, reply tells it.

Owns the order of a step's items; one_item makes single calls into steps. May import tables, tiers, pool_state and all below;
nothing of calls or inspection.
"""
