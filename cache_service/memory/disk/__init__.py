"""Blocks on a disk: the slab of a pool, the folder of slabs, and the threads that read and write them.

Owns the form of a slab, and that nothing comes back from it but what was put in. May import the rest of memory, core.values and
kvkeeper.common.service.
"""
