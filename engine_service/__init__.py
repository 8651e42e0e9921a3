"""The engine service: schedules requests and runs the model on KV memory that the cache service owns.

The scheduler and what it imports are pure: no grpc, asyncio, torch or clock. The loop is engine.py's, one step a
screen. The cache service is reached through kvkeeper.client alone.
"""
