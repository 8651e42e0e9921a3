"""Which sequences compute which tokens in the next step, and what the cache service's answer to that changes.

Owns the turn of a step: a plan is made, its answer is taken over, drawn tokens are appended. Scheduler is the facade; the
parts share the SchedulerState of state/.
May import values and numpy. Pure: no grpc, asyncio, torch or clock.
"""
