"""The bytes of a pool, and the processes that map them.

Owns arenas (shared_memory on the host, cuda on a device) and the attach socket that hands them, and step lanes, to engines.
May import core.values, kvkeeper.cuda and kvkeeper.service.
"""
