"""`kvkeeper hold`: a small process that keeps descriptors of memory alive while the service that made them is away.

Owns the socket on which descriptors come and go, what is held, systemd's store of descriptors, and the client's end of that
socket. May import kvkeeper.common.service, less what needs grpc there; no grpc, numpy or torch, no service and no client: the process
has to be small, and must have nothing that fails.
"""
