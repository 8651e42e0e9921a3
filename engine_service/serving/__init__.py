"""What brings the service to its clients: the fronts that have their connections and streams, and the lanes to the engine.

Owns the public address, the one path of each call and of each token, and which fronts there are: processes, or one in the
engine's own. At one end of a lane is a front: connections, who may call, the text of tokens, stop strings, and when streams are
written. At the other end are the calls that it asked the engine for.

The engine's end may import rpc, config, outputs, values, the engine's messages, kvkeeper.common.service and kvkeeper.common.trust; a front
the same, but of rpc only what knows neither model nor loop. It loads no torch.
"""
