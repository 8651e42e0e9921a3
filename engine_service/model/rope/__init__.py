"""Rotary position embeddings: what a config says of them, and the tables that turn queries and keys.

rope_config reads, without torch; rotary_table computes. May import checkpoint and families.
"""
