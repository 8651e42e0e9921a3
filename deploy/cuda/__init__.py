"""What both ends of a pool in CUDA memory need, the cache service that allocates it and the clients that map it.

Owns the few calls of the CUDA runtime, the handle of an arena that is handed over, and its import. May import
kvkeeper.service.extras and, with the first call, cuda-bindings; no torch, no service and no client.
"""
