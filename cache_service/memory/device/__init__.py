"""Arenas in the memory of a CUDA device, and what lets them outlive the service.

Owns the arenas of both kinds of handle, pinned host arenas beside them, and the link to the holder of their descriptors.
May import the rest of memory, core.values, kvkeeper.common.cuda, kvkeeper.common.hold and kvkeeper.common.service.
"""
