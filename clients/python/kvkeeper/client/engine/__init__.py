"""The engine service's clients, for asyncio and for threads.

Owns requests and their options, the chunks of output, asking again after an engine has gone, and the client's span. May import
the client's transport, retry and errors, kvkeeper.common.tracing and the messages of kvkeeper.engine.v1; not the cache's clients.
"""
