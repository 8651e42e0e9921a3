"""The engine service: schedules requests and runs the model on KV memory that the cache service owns.

Owns requests, their sequences and the model. A folder may import only from those below it, from the top down: rpc, loop,
speculation and cache_session, compute and text_workers, outputs and config, scheduler and model, values. The scheduler and
the values are pure: no grpc, asyncio, torch or clock. The loop is loop/engine.py, one step a screen. The cache service is
reached through kvkeeper.client alone.
"""
