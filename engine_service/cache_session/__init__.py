"""The engine's end of the cache service: the session, its lease, the mapped memory, transfers, the pool's limits, its events.

Owns what one session needs, from its opening to its end. May import kvkeeper.client and the protobuf types of the cache service
(no other folder of the engine does), torch, and compute, config, scheduler and values.
"""
