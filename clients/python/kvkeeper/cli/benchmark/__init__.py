"""`bench`: what a trace of requests hits in the cache.

Owns reading and generating traces, the replay against a running service, and the plot. May import console, kvkeeper.client and,
inside a function, the cache service's replay.
"""
