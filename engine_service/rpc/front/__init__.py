"""A front: the process that has the streams of clients, so that the engine's loop has time for steps.

Owns the public address, who may call, the text of tokens, stop strings, and when streams are written. What it cannot answer it
asks the engine over its lane. May import the other files of rpc that know neither model nor loop, outputs, values, the engine's
messages, kvkeeper.common.service and kvkeeper.common.trust; it loads no torch.
"""
