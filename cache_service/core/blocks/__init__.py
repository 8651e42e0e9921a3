"""The holders of each block.

Owns reference, fence, transfer and quarantine counts, the free list, the limits of cached blocks, pins and pressure. Knows
block ids and roots of tenants, no sequences and no tokens. May import index, eviction and core.values.
"""
