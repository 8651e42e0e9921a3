"""Blocks in a Valkey or Redis server, or a Mooncake store, that several cache services share.

Owns the form of keys and values, the secret of both, and that nothing comes back but what a service of the same secret has put
there (remote_store); and how each kind of server is spoken to (remote_server says what is asked of it). May import
memory.disk.digests, core.values, kvkeeper.common.service and kvkeeper.common.trust.
"""
