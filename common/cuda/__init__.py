"""What both ends of a pool in CUDA memory need, the cache service that allocates it and the clients that map it.

Owns the few calls of the CUDA runtime and of its driver, the handles of an arena that are handed over (an IPC handle, or a
descriptor where the memory is to outlive its service), and their import. May import kvkeeper.common.service.extras and, with the first
call, cuda-bindings and libcuda; no torch, no service and no client.
"""
