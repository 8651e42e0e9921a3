"""What the scheduler knows: running and waiting sequences, policies, fair shares and costs, one owner for each.

No grpc, asyncio, torch or clock.
"""
