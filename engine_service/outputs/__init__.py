"""From tokens to what a client gets: text, stop strings, constraints, best-of and beam search.

Knows no grpc and no asyncio.
"""
