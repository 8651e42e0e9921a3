"""The wire of the engine service: its methods, requests decoded into values, values encoded into responses, and the metrics.

Owns what a client sends and gets, submitted requests and their results, and the status of each error. The engine's protobuf
messages are used here and in serving alone. May import the folders of the engine below it, config, and kvkeeper.common.service.
"""
