"""The wire of the engine service: its methods, requests decoded into values, values encoded into responses, and the metrics.

Owns what a client sends and gets, streams, submitted requests and their results, and the status of each error. The engine's
protobuf messages are used here alone. May import every folder of the engine service, config, and kvkeeper.common.service.
"""
