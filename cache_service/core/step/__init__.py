"""One iteration of an engine: validate decides whether all of it is valid, apply carries it out, reply encodes the answer.

Owns the order of a step's items, and that a step changes all or nothing; one_item makes single calls into steps. What is
done to block tables is in tables. May import tables, tiers, pool_state and all below; nothing of calls or inspection.
"""
