"""Front processes as the engine has them: it starts them, starts one again that dies, and answers what they ask for clients.

Owns the address that fronts listen at, the lane between a front and the engine, and the calls and requests that came by each
front. A front's own side is the folder `front`. May import the other files of rpc, config, outputs, values, the engine's
messages, kvkeeper.common.service and kvkeeper.common.trust. What both ends share (frames, lane, told) imports no model and no loop.
"""
