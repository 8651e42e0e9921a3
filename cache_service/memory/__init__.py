"""The bytes of a pool, and the processes that map them.

Owns arenas (shared_memory on the host, device/ on a device), what of them outlives the service (kept/), and the attach socket
that hands them, and step lanes, to engines. May import core.values, kvkeeper.common.cuda, kvkeeper.common.hold and kvkeeper.common.service.
"""
