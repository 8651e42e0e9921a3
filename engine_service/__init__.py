"""The engine service: schedules requests and runs the model on KV memory that the cache service owns.

Owns every request from its arrival to its last chunk. May import kvkeeper.client, kvkeeper.common.service, kvkeeper.common.tracing and the
kernels; the cache service is reached through kvkeeper.client alone. The folders from the top down, each importing only from
those below it: rpc, loop, speculation and cache_session, compute and text_workers, outputs and config, scheduler and model,
values. The scheduler and the values are pure: no grpc, asyncio, torch or clock. The loop is loop/engine.py, one step a screen.
"""
