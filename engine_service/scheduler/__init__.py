"""Which sequences compute which tokens in the next step, and what the cache service's answer to that changes.

Owns the running and the waiting sequences, and the turn of a step: a plan is made, its answer is applied, drawn tokens are
appended. Read scheduler.py first, then planner.py (decide) and apply_answer.py (commit); running.py has the columns.
May import values and numpy. Pure: no grpc, asyncio, torch or clock.
"""
