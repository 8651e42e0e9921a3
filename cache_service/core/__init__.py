"""The cache service's pure core: the state machine of one pool.

Owns every decision about blocks, tables, prefixes and tiers. Its folders, from the top down: `manager`, calls, step and
inspection, tables, tiers, sequences, blocks, index and eviction, values. It has no grpc, asyncio, torch, structlog or
clock: time and ids come in as arguments.
"""
