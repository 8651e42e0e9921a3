"""The cache service: memory, block tables, prefix index and sharing of KV, behind a protobuf API. Owns the KV cache.

Its folders, from the top down: rpc (gRPC and protobuf, there alone), runtime (sessions, leases and pools on one event loop),
memory (arenas, and processes that map them), core (every decision about blocks; pure: no gRPC, asyncio, torch or clock). Beside
them: server puts the parts together, config is the one frozen configuration, preflight checks it against the machine, metrics
shows the numbers of the protocol to Prometheus, replay measures eviction policies without a service. May import
kvkeeper.common.service, kvkeeper.common.cuda, kvkeeper.common.tracing and the generated protocol; never the engine service.
"""
