"""What both services stand on, and the few parts of it that the command line uses.

Owns the reading of flags and environment into one frozen config; listen addresses with lock files and port checks; JSON logs,
and output that never waits; metrics; the router of calls, which turns exceptions into google.rpc.Status; start and drain of a
grpc.aio server with health and reflection; the settings of gRPC's runtime. May import kvkeeper.common.tracing, grpc and structlog; no
service: each hands in its own config fields, methods, error classes and codes.
"""

VERSION = "0.1.0"  # of the package; pyproject.toml says the same
