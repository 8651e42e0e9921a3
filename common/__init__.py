"""What both services, the client and the command line stand on.

Owns processes as such (settings, listening, logs, drain), trust, tracing, CUDA calls and the process that holds device memory.
It knows no service, no client and no protobuf message of ours. May import nothing of kvkeeper but itself.
"""
