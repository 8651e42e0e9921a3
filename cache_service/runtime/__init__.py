"""The core on one event loop: sessions and their leases, pools with their memory, and work in slices between calls.

Owns every timer and background task of the service. May import core, memory and config; knows no gRPC and no protobuf.
"""
