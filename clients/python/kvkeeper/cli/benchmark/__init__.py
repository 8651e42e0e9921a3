"""`bench`: what a trace of requests hits in the cache, and in each tier below it; what fewer bits of K and V cost.

Owns reading and generating traces, the replay against a running service, and the plots. May import console,
kvkeeper.client and, inside a function, replays of the cache service and measurements of the engine.
"""
