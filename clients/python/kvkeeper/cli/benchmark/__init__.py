"""`bench`: what a trace of requests hits in the cache.

Owns reading and generating traces, and the replay against a running service. May import console, kvkeeper.client and, inside a
function, the replay of the cache service.
"""
