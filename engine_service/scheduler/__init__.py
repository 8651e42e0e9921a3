"""The pure scheduler: which sequences compute which tokens in the next step, and what an answer changes.

No grpc, asyncio, torch or clock.
"""
