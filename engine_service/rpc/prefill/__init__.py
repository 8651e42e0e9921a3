"""Prompts that one engine computes for another: both ends.

Owns a prompt under way between two engines, and what becomes of its request when either of them fails. May import hand_over and
the other files of rpc but service and methods, loop, outputs, compute, values, kvkeeper.client, and the engine's messages.
"""
