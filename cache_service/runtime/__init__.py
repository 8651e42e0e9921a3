"""The core on one event loop. Owns sessions and their leases, pools with their memory, and every timer and background task.

Long work is done in slices between calls. Knows no gRPC and no protobuf. May import core, memory, config and preflight.
"""
