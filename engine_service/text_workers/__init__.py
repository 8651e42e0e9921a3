"""Text and constraints in worker processes, within limits of time and memory, so that no client holds up the loop.

Owns the processes, the order in which clients are served, and the limits of one job. May import outputs, values, and the errors
of model.checkpoint; what runs in a worker process (text_worker.py) loads neither torch nor grpc.
"""
