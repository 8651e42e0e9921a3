"""kvkeeper http: the engine service for clients that speak HTTP, as OpenAI's do.

Owns the paths (app.py), the server (server.py), the fields of requests (fields.py), what the engine is asked (asking.py), and
what is sent to clients (answering.py). It is a client of the engine, in a process of its own. May import kvkeeper.client,
kvkeeper.common and the messages of kvkeeper.engine.v1; no service.
"""
