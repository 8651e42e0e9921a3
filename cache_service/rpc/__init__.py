"""The cache service on the wire. Owns its gRPC and protobuf: methods, statuses, streams, and messages to values and back.

Every RPC of the protocol has one handler: in a file named after its group of calls (session_calls, sequence_calls, ...), or in
step_handler. methods.py registers the groups side by side; convert/ checks and converts each message. step_lane.py carries the
messages of Step beside gRPC. May import runtime, core, config, the attach socket of memory, and kvkeeper.common.service.
"""
