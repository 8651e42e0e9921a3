"""Requests that change their engine: when one engine takes over from another, and when one computes prompts for another.

Owns which requests are on their way, and the blocks that they keep for the other engine's session. May import loop, outputs,
compute, values, messages, kvkeeper.client, and the engine's messages; what admits requests is handed in.
"""
