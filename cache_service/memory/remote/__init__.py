"""Blocks in a Valkey or Redis server that several cache services share: their keys, their values, and the secret of both.

Owns the form of what is put there, and that nothing comes back but what a service of the same secret has put there. May import
memory.disk.digests, core.values, kvkeeper.service and kvkeeper.trust.
"""
