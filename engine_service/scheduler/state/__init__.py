"""What the scheduler knows, one owner for each piece of state.

Owns running and waiting sequences, the table of their states, policies and fair shares, the limits of the pool, headroom, and
what preemption costs.
May import values and numpy; knows none of the parts that change it. Pure: no grpc, asyncio, torch or clock.
"""
