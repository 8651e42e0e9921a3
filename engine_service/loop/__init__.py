"""The one asyncio loop: steps, the worker thread that computes them, open requests, and what is measured of both.

Owns the order of a step, the session that is served on, and every open request until its end. May import cache_session,
speculation, compute, outputs, config, scheduler and values; knows neither gRPC nor protobuf.
"""
