"""From tokens to what a client gets.

Owns a request's generation: text, stop strings, constraints, best-of and beam search, and when each continuation ends.
May import values, the errors and files of model, and the libraries for tokenizers, templates and grammars; knows no torch,
grpc, asyncio or scheduler.
"""
