"""Guessed tokens.

Owns where guesses come from (the prompt, or a draft model), how many are made for each sequence, and whether guessing pays.
May import compute, scheduler and values; knows no grpc or asyncio.
"""
