"""The cache service: memory, block tables, prefix index and sharing of KV, behind a protobuf API.

The pure core (manager and what it imports) knows no grpc, asyncio, torch or clock; service and server are its thin shell.
"""
