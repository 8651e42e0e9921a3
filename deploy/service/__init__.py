"""What every kvkeeper service is made of.

Flags over environment over defaults into one frozen config; listen addresses with lock files and port checks; JSON logs; the
door that turns exceptions into google.rpc.Status; start and drain of a grpc.aio server with health and reflection. Knows no
service: each brings its own config fields, methods, error classes and codes.
"""

VERSION = "0.1.0"  # of the package; pyproject.toml says the same
