"""What is cached, published for programs that are no clients of ours: `events`.

Owns the events as vLLM makes them (kv_events), what was published of a pool (publication), and the sockets (events). May import
console, kvkeeper.client and the messages of the protocol; msgspec, cbor2 and pyzmq, the extra `events`, when the command runs.
"""
