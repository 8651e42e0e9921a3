"""Protobuf messages to the core's values and back, with every bound checked on the way in.

Knows no session and no pool.
"""
