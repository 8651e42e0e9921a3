"""One iteration of an engine.

Owns the step: validate decides whether all of it is lawful, apply carries it out, reply tells it, and one_item makes single
calls into steps. May import tables, tiers, pool_state and all below; nothing of calls or inspection.
"""
