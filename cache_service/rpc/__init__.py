"""The cache service on the wire. Owns its gRPC and protobuf: methods, statuses, streams, and messages to values and back.

Every RPC of the protocol has one handler, in a file named after its group of calls (session_calls, sequence_calls, ...).
step_handler.py applies steps, which come as calls of their own, over step_stream.py or over step_lane.py. methods.py registers
the groups side by side; convert/ checks and converts each message. May import runtime, core, config, the attach socket of
memory, and kvkeeper.common.service.
"""
