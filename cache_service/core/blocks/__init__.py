"""Who holds a block: reference counts, fences, the free list, limits on what is cached, pins and pressure.

Knows block ids and roots only, no sequence and no token.
"""
