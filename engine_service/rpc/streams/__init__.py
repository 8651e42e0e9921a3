"""Streams to clients: what is unread, when it is written, and many requests on one call.

Owns the chunks that a client has not read, the times of writing, and the requests of GenerateMany calls. May import the other
files of rpc but service and methods, outputs, values, the engine's messages, and kvkeeper.common.service.
"""
