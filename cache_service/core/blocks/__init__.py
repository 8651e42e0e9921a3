"""The holders of each block.

Owns reference, fence, transfer and quarantine counts, the free list, the limits of cached blocks, pins, pressure, and hints of
reuse with what they were worth (reuse_order, hint_record). Knows block ids and numbers of tenants, no sequences and no tokens.
May import index, eviction and core.values.
"""
