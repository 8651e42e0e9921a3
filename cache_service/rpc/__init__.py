"""The cache service on the wire: its methods, in groups of calls, and messages to values and back.

gRPC and protobuf live in this folder alone. May import runtime, core and config. Every RPC of the protocol has one handler: in
a file named after its group of calls (session_calls, sequence_calls, ...), or in step_handler. methods.py registers the groups
side by side; convert/ checks and converts each message.
"""
