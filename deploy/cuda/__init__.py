"""What both ends of a pool in CUDA memory need: the runtime's few calls, the handle that is handed over, and its import."""
