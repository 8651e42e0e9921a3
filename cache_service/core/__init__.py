"""The cache service's pure core: the state machine of one pool.

Owns every decision about blocks, tables, prefixes and tiers. From the top down: `manager` the facade, calls, step and
inspection, tables, tiers, `pool_state`, sequences, blocks, index and eviction, values. Each imports only what stands below it.
May import numpy and the standard library; no grpc, asyncio, torch, structlog or clock: time and ids come in as arguments.
"""
