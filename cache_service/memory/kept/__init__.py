"""What of a pool's memory outlives the service, in a folder of files.

Owns the form of the files (description, index_file, tenant_log), which of them are in the folder (memory_directory), how arenas
come out of them (kept_memory), and the digests by which a later run notices damage (block_digests). Nothing is unpickled.
May import core.values, memory's own modules and kvkeeper.common.service.
"""
