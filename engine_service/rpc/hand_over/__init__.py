"""Open requests on their way from one engine to another that takes its place: both ends, and what is sent between them.

Owns a hand-over under way, and what becomes of each request when either engine dies. May import the other files of rpc but
service and methods, loop, outputs, compute, values, kvkeeper.client, and the engine's messages.
"""
