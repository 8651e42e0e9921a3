"""The engine's end of the cache service: the session, the step stream, the mapped memory and the transfers."""
