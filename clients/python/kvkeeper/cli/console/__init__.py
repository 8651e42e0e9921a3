"""What all commands share.

Owns flags and their types, addresses, tables, JSON, error texts and exit codes. May import kvkeeper.client and
kvkeeper.common.service; no command. Modules on the way of every command import nothing that takes time.
"""
