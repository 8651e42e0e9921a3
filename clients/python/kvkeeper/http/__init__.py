"""kvkeeper http: the engine service for clients that speak HTTP."""
