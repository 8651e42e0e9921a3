"""How a step's work gets to the device and in which order: queues, uploads, copies, and the tokens that stay there.

Owns the streams, the events between them, and the memory from which the host's arrays go up. May import scheduler, values and
torch; knows no model.
"""
