"""kvkeeper http: the engine service for clients that speak HTTP, as OpenAI's do.

A client of the engine, in a process of its own. app.py has the paths, server.py the server; fields.py what requests may say,
asking.py what the engine is asked, answering.py what is told. responses/ reads what a model said. May import kvkeeper.client,
kvkeeper.common and the messages of kvkeeper.engine.v1; no service.
"""
