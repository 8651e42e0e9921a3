"""`generate`: a prompt goes to an engine, and its continuations are printed.

Owns the flags that make a request, and the printing of text, log probabilities and usage. May import console, kvkeeper.client
and kvkeeper.common.tracing; no service.
"""
